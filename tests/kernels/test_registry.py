"""Which backend runs where."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from ragcache_kernels import BACKENDS, best_backend, get_backend, registry


@pytest.fixture(autouse=True)
def _not_remembered() -> Iterator[None]:
    registry.takes_kernels.cache_clear()
    yield
    registry.takes_kernels.cache_clear()


def test_every_backend_goes_by_its_name() -> None:
    assert {name: get_backend(name).name for name in BACKENDS} == {name: name for name in BACKENDS}
    with pytest.raises(KeyError, match="abacus"):
        get_backend("abacus")


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "dims", "name"),
    [
        ("cpu", (9, 0), torch.bfloat16, [64], "torch"),
        ("mps", (9, 0), torch.bfloat16, [64], "torch"),
        ("cuda", (8, 0), torch.bfloat16, [64, 256], "triton"),
        ("cuda", (9, 0), torch.float16, [80], "triton"),
        ("cuda", (9, 0), torch.bfloat16, [64, 257], "torch"),  # wider than the kernels take
        ("cuda", (9, 0), torch.float32, [64], "torch"),
        ("cuda", (7, 5), torch.float16, [64], "torch"),
    ],
)
def test_gpus_get_the_kernels_where_these_fit(
    device: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    dims: list[int],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert best_backend(torch.device(device), dtype, dims) == name


@pytest.mark.parametrize("installed", [None, "3.5.1"])
def test_without_a_triton_that_they_work_with_a_gpu_runs_torch(
    installed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(registry, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert best_backend(torch.device("cuda"), torch.bfloat16, [64]) == "torch"
