"""What is to be done meanwhile is done once a step, when all of it is left to compute."""

from __future__ import annotations

import pytest
from ragcache_kernels import get_backend
from ragcache_kernels.native.library import supported_tiers

PROMPTS = {"a": [5, 17, 40, 8, 8, 61, 33], "b": [12, 7, 77]}


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", ["llama", "gemma", "phi"])  # one call; fused layers; plain ones
def test_it_is_done_once_a_step_between_plan_and_layers(make_pair, monkeypatch, name, backend):
    if backend == "native" and not supported_tiers():
        pytest.skip("the C kernels were not built")
    pair = make_pair(name, kernels=get_backend(backend))
    engine, done = pair.engine(backend=backend), []
    runner, decoder = engine._runner, pair.paged.get_decoder()
    run, plan = runner.run, runner._backend.plan
    monkeypatch.setattr(runner, "run", lambda batch, _: run(batch, lambda: done.append("other")))
    monkeypatch.setattr(runner._backend, "plan", lambda *args: done.append("plan") or plan(*args))
    norm = decoder.norm if hasattr(decoder, "norm") else decoder.final_layernorm
    norm.register_forward_hook(lambda *_: done.append("norm"))
    pair.run(engine, PROMPTS, 3)
    assert done == 3 * ["plan", "other", "norm"]
