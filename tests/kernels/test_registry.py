"""Which backend runs where."""

from __future__ import annotations

import pytest
from ragcache_kernels import BACKENDS, best_backend, get_backend, registry


def test_every_backend_goes_by_its_name() -> None:
    assert {name: get_backend(name).name for name in BACKENDS} == {name: name for name in BACKENDS}
    with pytest.raises(KeyError, match="abacus"):
        get_backend("abacus")


@pytest.mark.parametrize(
    ("device", "dims", "name"),
    [
        ("cpu", [64], "torch"),
        ("cuda", [64, 256], "triton"),
        ("cuda", [64, 257], "torch"),  # wider than the kernels take
        ("mps", [64], "torch"),
    ],
)
def test_gpus_get_the_kernels_that_take_their_heads(
    device: str, dims: list[int], name: str
) -> None:
    assert best_backend(device, dims) == name


def test_without_triton_a_gpu_runs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert best_backend("cuda", [64]) == "torch"
