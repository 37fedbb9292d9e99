"""Plans and machines that tests change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ragcache.doctor.machine import Machine, Native
from ragcache.doctor.model import FoundModel
from ragcache.doctor.plan import Plan

PLAN = Plan(
    model=FoundModel("m", "folder", "/models/m", ready=True),
    device="cpu",
    dtype="bfloat16",
    dtype_reason="",
    auto_dtype="bfloat16",
    backend="native",
    others={"triton": "it is for CUDA devices", "torch": "native is faster"},
    quantization=None,
    weights=1,
    kv_dtype="bfloat16",
    kv_tokens=10_000,
    max_model_len=8192,
    max_draft=8,
    draft_reason="",
)
MACHINE = Machine(
    cpu="a CPU",
    cores=8.0,
    physical_cores=4,
    threads=4,
    memory=1 << 34,
    gpus=[],
    nvidia_driver=False,
    native=Native(["baseline", "avx2"], "avx2", forced=False, missing=None),
)


@pytest.fixture
def plan() -> Callable[..., Plan]:
    """A plan on a CPU that nothing makes slow, but for what is changed."""
    return lambda **changes: replace(PLAN, **changes)


@pytest.fixture
def machine() -> Callable[..., Machine]:
    """A machine that is right for it, but for what is changed."""

    def make(**changes: Any) -> Machine:
        native = {
            name: changes.pop(name)
            for name in ("supported", "tier", "forced", "missing")
            if name in changes
        }
        return replace(MACHINE, native=replace(MACHINE.native, **native), **changes)

    return make
