"""What is to be done meanwhile is done once a step, when all of it is left to compute."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
from ragcache_kernels import get_backend
from ragcache_kernels.native.library import supported_tiers

KERNELS = ("run_layers", "rotate_and_write", "write_kv")  # what a layer begins with
PROMPTS = {"a": [5, 17, 40, 8, 8, 61, 33], "b": [12, 7, 77]}


@pytest.fixture
def log(monkeypatch):
    """Have every call of an object's method written down under a name."""
    done = []

    def wrap(owner, method, name):
        plain = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *args: done.append(name) or plain(*args))

    return done, wrap


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", ["llama", "gemma", "phi"])  # one call; fused layers; plain ones
def test_it_is_done_once_a_step_between_plan_and_layers(make_pair, monkeypatch, log, name, backend):
    if backend == "native" and not supported_tiers():
        pytest.skip("the C kernels were not built")
    pair = make_pair(name, kernels=get_backend(backend))
    engine, (done, wrap) = pair.engine(backend=backend), log
    runner, decoder = engine._runner, pair.paged.get_decoder()
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda batch, _: run(batch, lambda: done.append("other")))
    wrap(runner._backend, "plan", "plan")
    for kernel in KERNELS:
        wrap(runner._backend, kernel, "layers")
    norm = decoder.norm if hasattr(decoder, "norm") else decoder.final_layernorm
    norm.register_forward_hook(lambda *_: done.append("norm"))
    pair.run(engine, PROMPTS, 3)
    assert done.count("other") == 3
    assert [each for each, _ in groupby(done)] == 3 * ["plan", "other", "layers", "norm"]


def test_it_is_done_before_blocks_are_swapped(llama, monkeypatch, log):
    engine, (done, wrap) = llama.engine(num_blocks=8, host_blocks=30), log
    run = engine._runner.run
    monkeypatch.setattr(
        engine._runner, "run", lambda batch, _: run(batch, lambda: done.append("other"))
    )
    wrap(engine._runner, "run", "step")
    for swap in ("swap_out", "swap_in"):
        wrap(engine._runner.host, swap, "swap")
    for first in 2 * (3, 4, 5, 6):
        llama.run(engine, {"a": [first, *range(7, 27)]}, 2)
    assert engine.stats.host.swapped_out
    assert engine.stats.host.swapped_in
    assert done.count("other") == done.count("step")
    order = [each for each, _ in groupby(done)]
    assert {before for before, each in pairwise(order) if each == "swap"} == {"other"}
