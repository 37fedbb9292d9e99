from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ragcache_kernels import BACKENDS, AttentionBackend, get_backend
from ragcache_kernels.native import library
from ragcache_kernels.native.backend import NativeBackend
from ragcache_kernels.native.library import TIERS, Team, supported_tiers

if folder := os.environ.get("NATIVE_LIBRARIES"):  # of test_sanitizers.py
    library.FOLDER = Path(folder)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: on a busy machine, handing them to threads takes longest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _takes_dtype(request: pytest.FixtureRequest) -> None:
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if params.get("backend") in TIERS and params.get("dtype") is torch.float16:
        pytest.skip("the C kernels take float32 and bfloat16")


@pytest.fixture(params=[*sorted(BACKENDS.keys() - {"native"}), *supported_tiers()], scope="session")
def backend(request: pytest.FixtureRequest) -> AttentionBackend[Any]:
    """Every backend, and of the native one every tier that this machine runs."""
    if request.param in BACKENDS:
        return get_backend(request.param)
    return NativeBackend(Team(request.param, threads=2))
