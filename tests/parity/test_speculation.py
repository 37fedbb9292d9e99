"""What is sampled behind a draft has the bits that it would have had without."""

from __future__ import annotations

import pytest
import torch
from ragcache_kernels import get_backend, tiles
from ragcache_kernels.native.backend import NativeBackend
from ragcache_kernels.native.library import supported_tiers
from ragcache_kernels.planner import shared_runs

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "smollm3"]
LOOP = [5, 17, 40, 8, 8, 61]
FEW = {5: 40.0, 8: 40.0, 17: 40.0}  # tokens: of these drafts are often right, and often wrong
PROMPTS = {"a": [*LOOP, *LOOP, 5], "b": [90, *LOOP, 12, 7, *LOOP], "c": [3, 4, 3, 4, 3]}
KINDS = {
    "float32": (torch.float32, False, None),
    "bfloat16": (torch.bfloat16, False, None),
    "int8 weights": (torch.bfloat16, True, None),
    "int8 weights on float32": (torch.float32, True, None),
    "int8 keys": (torch.bfloat16, False, torch.int8),
}

needs_native = pytest.mark.skipif(not supported_tiers(), reason="the C kernels were not built")


def answers(pair, max_draft, prompts=PROMPTS, kv_dtype=None, **options):
    """What requests at once are told, all rows of logits by context, and the statistics."""
    setting = {"num_blocks": 400, "max_batch_tokens": 48, "kv_dtype": kv_dtype}
    engine = pair.engine(backend="native", max_draft=max_draft, **setting)
    assert engine._runner.exact
    tokens = pair.run(engine, prompts, 60, logprobs=2, logit_bias=FEW, **options)
    rows = {}
    for context, logits in engine.logits:
        assert torch.equal(rows.setdefault(tuple(context), logits), logits)
    return (tokens, engine._sink.logprobs), rows, engine._snapshot()


def check(pair, **options):
    """Compare answers with drafts and without; returns the statistics of the former."""
    expected, plain_rows, plain = answers(pair, 0, **options)
    told, rows, stats = answers(pair, 8, **options)
    assert told == expected
    assert plain_rows.keys() <= rows.keys()
    assert all(torch.equal(row, rows[context]) for context, row in plain_rows.items())
    assert plain.drafted_tokens == 0
    return stats


@needs_native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_change_no_bit(make_pair, name, kind):
    dtype, quantised, kv_dtype = KINDS[kind]
    pair = make_pair(name, dtype, kernels=NativeBackend(quantised=quantised))
    stats = check(pair, kv_dtype=kv_dtype)
    assert 10 < stats.accepted_tokens < stats.drafted_tokens


@needs_native
@pytest.mark.parametrize("shared", [0, 1088], ids=["apart", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_bit_where_sums_are_long(make_pair, monkeypatch, kind, shared):
    runs = []  # of blocks that are read once for several

    def watch(*args):
        found = list(shared_runs(*args))
        runs.extend(found)
        return found

    monkeypatch.setattr(tiles, "shared_runs", watch)
    dtype, quantised, kv_dtype = KINDS[kind]
    shape = {"hidden_size": 320, "intermediate_size": 704, "head_dim": 64, "initializer_range": 0.1}
    pair = make_pair("llama", dtype, kernels=NativeBackend(quantised=quantised), **shape)
    prompts = {name: (1088 * LOOP)[:shared] + 10 * each for name, each in PROMPTS.items()}
    stats = check(pair, prompts=prompts, kv_dtype=kv_dtype)
    assert stats.accepted_tokens > 10
    assert stats.hit_tokens == 2 * shared
    assert bool(runs) is bool(shared)


@needs_native
@pytest.mark.parametrize("tier", supported_tiers())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_change_no_bit_with_any_instructions(make_pair, monkeypatch, dtype, tier):
    monkeypatch.setenv("RAGCACHE_ISA", tier)
    pair = make_pair("llama", dtype, kernels=NativeBackend())
    assert check(pair).accepted_tokens > 10


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_change_nothing_that_is_drawn(make_pair, dtype):
    pair = make_pair("llama", dtype, kernels=NativeBackend())
    options = {"temperature": 0.4, "seed": 7, "repetition_penalty": 1.05, "top_p": 0.95}
    assert check(pair, **options).accepted_tokens > 10


@needs_native
def test_what_is_computed_behind_a_draft_is_right(make_pair):
    pair = make_pair("llama", kernels=NativeBackend())
    engine = pair.engine(backend="native", max_draft=8)
    pair.run(engine, PROMPTS, 40)
    pair.check_logits(engine)


@needs_native
@pytest.mark.parametrize("name", ["gemma", "olmo2"])
def test_other_families_are_not_taken_to_be_exact(make_pair, name):
    pair = make_pair(name, kernels=NativeBackend())
    assert not pair.engine(backend="native")._runner.exact


def test_nor_are_other_kernels(make_pair):
    pair = make_pair("llama", kernels=get_backend("torch"))
    assert not pair.engine()._runner.exact
