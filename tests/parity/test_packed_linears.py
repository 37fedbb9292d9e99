"""Fused layers over packed weights: right, the same bits for a hit, and without a second copy."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from ragcache_kernels.native.backend import NativeBackend
from ragcache_kernels.native.library import supported_tiers

from ragcache.engine.fast_model import use_fast_layers
from ragcache.engine.support import prepare_model

PROMPT = [5, 17, 40, 8, 8, 61, 33, 90, 12, 7, 77, 25, 50]  # three blocks and one token
COUNT = 4
NAMES = ["gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", "smollm3"]

pytestmark = pytest.mark.skipif(not supported_tiers(), reason="the C kernels were not built")


def backend(quantised: bool = False) -> NativeBackend:
    return NativeBackend(quantised=quantised)


@pytest.mark.parametrize("name", NAMES)
def test_cold_and_warm_logits_are_those_of_the_plain_model(make_pair, name):
    pair = make_pair(name, kernels=backend())
    assert pair.fast_layers == 2
    engine = pair.engine(backend="native", max_batch_tokens=5)
    for _ in ("cold", "warm"):
        assert pair.run(engine, {"a": PROMPT}, COUNT) == {"a": pair.greedy(PROMPT, COUNT)}
        pair.check_logits(engine)
    assert engine.stats.hit_tokens == 12


@pytest.mark.parametrize("name", NAMES)
def test_pools_in_pairs_give_logits_near_those_of_the_plain_model(make_pair, name):
    pair = make_pair(name, torch.bfloat16, kernels=backend(), head_dim=16)
    assert pair.fast_layers == 2
    engine = pair.engine(backend="native", max_batch_tokens=5, block_size=16)
    for _ in ("cold", "warm"):
        pair.run(engine, {"a": 3 * PROMPT}, COUNT)
        pair.check_logits(engine, tolerance=0.2)
    assert engine.stats.hit_tokens == 32


@pytest.mark.parametrize("quantised", [False, True], ids=["whole", "int8"])
@pytest.mark.parametrize(
    ("dtype", "block_size", "hit_tokens"),
    [(torch.float32, 4, 24), (torch.bfloat16, 4, 24), (torch.bfloat16, 16, 16)],
    ids=["float32", "bfloat16", "paired"],
)
def test_hits_and_chunks_change_no_bit(make_pair, dtype, block_size, hit_tokens, quantised):
    pair = make_pair("llama", dtype, kernels=backend(quantised), head_dim=16)
    rows = []
    for chunk in (1, 5, 512):
        engine = pair.engine(
            backend="native", max_batch_tokens=chunk, max_running=1, block_size=block_size
        )
        for _ in ("cold", "warm"):
            pair.run(engine, {"a": 2 * PROMPT}, COUNT)
            rows.append(torch.stack([row for _, row in engine.logits]))
            engine.logits.clear()
        assert engine.stats.hit_tokens == hit_tokens
    assert all(torch.equal(each, rows[0]) for each in rows)


@pytest.mark.parametrize("name", NAMES)
def test_quantised_logits_are_near_those_of_the_plain_model(make_pair, name):
    pair = make_pair(name, kernels=backend(quantised=True))
    assert pair.fast_layers == 2
    engine = pair.engine(backend="native")
    pair.run(engine, {"a": PROMPT}, 1)
    ((context, found),) = engine.logits
    expected = pair.reference(context)[-1]
    assert 1e-4 < (found - expected).norm() / expected.norm() < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_that_are_no_single_call_are_tried_as_well(make_pair, monkeypatch, dtype):
    monkeypatch.setattr(NativeBackend, "whole_layer", lambda *_: None)
    pair = make_pair("qwen3", dtype, kernels=backend(), head_dim=16)
    assert pair.fast_layers == 2


def test_weights_that_were_copied_are_freed(make_pair):
    model = copy.deepcopy(make_pair("llama").plain)
    prepare_model(model)
    assert use_fast_layers(model, backend(), keep_plain=False) == 2
    left = {name for name, each in model.named_parameters() if not each.is_meta}
    assert not any("proj" in name for name in left)
    assert "model.embed_tokens.weight" in left
    layer = model.get_decoder().layers[0]
    for call in (layer.mlp, partial(layer, position_embeddings=None), model.lm_head):
        with pytest.raises(RuntimeError, match="freed"):
            call(torch.zeros(1, 1, 32))


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_leaves_the_embedding(make_pair, tied):
    model = copy.deepcopy(make_pair("llama", tie_word_embeddings=tied).plain)
    prepare_model(model)
    use_fast_layers(model, backend(), keep_plain=False)
    assert model.lm_head.weight.is_meta != tied
    assert not model.get_input_embeddings().weight.is_meta
