from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ragcache_kernels import BACKENDS, AttentionBackend, get_backend


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: on a busy machine, handing them to threads takes longest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=sorted(BACKENDS), scope="session")
def backend(request: pytest.FixtureRequest) -> AttentionBackend[Any]:
    return get_backend(request.param)
