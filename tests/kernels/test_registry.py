"""Which backend runs where."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from ragcache_kernels import BACKENDS, PREFERENCE, best_backend, get_backend, objection, registry
from ragcache_kernels.native import library


@pytest.fixture(autouse=True)
def _not_remembered() -> Iterator[None]:
    registry.against_kernels.cache_clear()
    yield
    registry.against_kernels.cache_clear()


def test_every_backend_goes_by_its_name() -> None:
    built = BACKENDS.keys() - (set() if library.supported_tiers() else {"native"})
    assert {name: get_backend(name).name for name in built} == {name: name for name in built}
    with pytest.raises(KeyError, match="abacus"):
        get_backend("abacus")


def test_every_backend_has_its_rank() -> None:
    assert sorted(PREFERENCE) == sorted(BACKENDS)


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "dims", "name"),
    [
        ("cpu", (9, 0), torch.bfloat16, [64, 256], "native"),
        ("cpu", (9, 0), torch.float32, [80], "native"),
        ("cpu", (9, 0), torch.float16, [64], "torch"),
        ("cpu", (9, 0), torch.float32, [64, 257], "torch"),  # wider than the kernels take
        ("mps", (9, 0), torch.bfloat16, [64], "torch"),
        ("cuda", (8, 0), torch.bfloat16, [64, 256], "triton"),
        ("cuda", (9, 0), torch.float16, [80], "triton"),
        ("cuda", (9, 0), torch.bfloat16, [64, 257], "torch"),  # wider than the kernels take
        ("cuda", (9, 0), torch.float32, [64], "torch"),
        ("cuda", (7, 5), torch.float16, [64], "torch"),
    ],
)
def test_kernels_run_where_they_fit(
    device: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    dims: list[int],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert best_backend(torch.device(device), dtype, dims) == name


@pytest.mark.parametrize(
    ("capability", "dtype", "dims", "reason"),
    [
        ((7, 5), torch.float16, [64], "compute capability 8.0"),
        ((9, 0), torch.float32, [64], "float16 and bfloat16"),
        ((9, 0), torch.float16, [64, 512], "up to 256 elements"),
        ((9, 0), torch.float16, [64], None),
    ],
)
def test_what_a_gpu_does_not_get_is_told_with_the_reason(
    capability: tuple[int, int],
    dtype: torch.dtype,
    dims: list[int],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    told = objection("triton", torch.device("cuda"), dtype, dims)
    assert (told is None) if reason is None else (told is not None and reason in told)
    assert objection("torch", torch.device("cuda"), dtype, dims) is None


@pytest.mark.parametrize(("installed", "reason"), [(None, "not installed"), ("3.5.1", "3.5.1")])
def test_without_a_triton_that_they_work_with_a_gpu_runs_torch(
    installed: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(registry, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert best_backend(torch.device("cuda"), torch.bfloat16, [64]) == "torch"
    assert reason in (objection("triton", torch.device("cuda"), torch.bfloat16, [64]) or "")


def test_without_a_compiled_library_a_cpu_runs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(library, "supported_tiers", list)
    assert best_backend(cpu, torch.bfloat16, [64]) == "torch"
    assert "not built" in (objection("native", cpu, torch.bfloat16, [64]) or "")


def test_a_forced_instruction_set_that_cannot_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGCACHE_ISA", "abacus")
    assert "abacus" in (objection("native", torch.device("cpu"), torch.float32, [64]) or "")
