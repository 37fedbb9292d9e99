"""Models that run without transformers' forward pass give the same bits as with it."""

from __future__ import annotations

import logging
from functools import wraps

import pytest
import torch
from ragcache_kernels import get_backend
from ragcache_kernels.native.backend import NativeBackend
from ragcache_kernels.native.library import supported_tiers
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

from ragcache.engine import fast_decoder
from ragcache.engine.fast_decoder import Angles, FastDecoder

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "smollm3"]
PROMPT = [5, 17, 40, 8, 8, 61, 33, 90, 12, 7, 77, 25, 50]
PROMPTS = {"a": 8 * PROMPT, "b": PROMPT}  # "a" has positions behind the first pieces of angles

needs_native = pytest.mark.skipif(not supported_tiers(), reason="the C kernels were not built")


@pytest.fixture
def make_native(make_pair):
    def make(name, **options):
        return make_pair(name, kernels=NativeBackend(), **options)

    return make


def is_fast(model):
    return isinstance(getattr(model.forward, "__self__", None), FastDecoder)


def rows(pair, block_size):
    """Logits of chunks of prompts and of decodes."""
    engine = pair.engine(backend="native", max_batch_tokens=60, block_size=block_size)
    pair.run(engine, PROMPTS, 4)
    return torch.stack([logits for _, logits in engine.logits])


@needs_native
@pytest.mark.parametrize(
    ("dtype", "block_size", "head_dim"),
    [(torch.float32, 4, 8), (torch.bfloat16, 4, 8), (torch.bfloat16, 16, 16)],
    ids=["float32", "bfloat16", "paired"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_plain_families_give_the_same_bits(
    make_native, monkeypatch, name, dtype, block_size, head_dim
):
    monkeypatch.setattr(fast_decoder, "PIECE", 40)
    ours = make_native(name, dtype=dtype, head_dim=head_dim)
    monkeypatch.setattr(fast_decoder, "FAMILIES", set())
    theirs = make_native(name, dtype=dtype, head_dim=head_dim)
    assert [is_fast(pair.paged) for pair in (ours, theirs)] == [True, False]
    assert ours.fast_layers == theirs.fast_layers == 2
    assert torch.equal(rows(ours, block_size), rows(theirs, block_size))


def test_all_the_plain_families_are_tested():
    assert {name.split(".")[2] for name in fast_decoder.FAMILIES} == set(FAMILIES)


@needs_native
@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3_text"])
def test_other_families_keep_their_forward_pass(make_native, name):
    pair = make_native(name)
    assert pair.fast_layers == 2
    assert not is_fast(pair.paged)


def test_without_whole_layers_a_model_keeps_its_forward_pass(make_pair):
    assert not is_fast(make_pair("llama", kernels=get_backend("torch")).paged)


@needs_native
def test_a_model_whose_forward_pass_does_more_keeps_it(make_native, monkeypatch, caplog):
    plain = LlamaForCausalLM.forward

    @wraps(plain)
    def scaled(self, *args, **options):
        output = plain(self, *args, **options)
        output.logits = 1.01 * output.logits
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with caplog.at_level(logging.WARNING):
        pair = make_native("llama")
    assert caplog.messages == ["LlamaForCausalLM runs as it is: its results would differ"]
    assert not is_fast(pair.paged)
    engine = pair.engine(backend="native")
    pair.run(engine, PROMPTS, 2)
    pair.check_logits(engine)


@needs_native
def test_a_model_whose_parts_are_unknown_keeps_its_forward_pass(make_native, monkeypatch, caplog):
    def break_table(*_):
        raise TypeError("no table of angles")

    monkeypatch.setattr(fast_decoder.Angles, "_compute", break_table)
    with caplog.at_level(logging.WARNING):
        pair = make_native("llama")
    (message,) = caplog.messages
    assert message.startswith("LlamaForCausalLM runs as it is: ")
    assert "no table of angles" in message
    assert not is_fast(pair.paged)


@needs_native
def test_outside_of_a_step_the_model_answers_as_before(make_native):
    pair = make_native("llama")
    assert is_fast(pair.paged)
    pair.paged.set_attn_implementation("eager")
    with torch.inference_mode():
        output = pair.paged(input_ids=torch.tensor([PROMPT]), use_cache=True)
    assert torch.equal(output.logits[0], pair.reference(PROMPT))
    assert output.past_key_values.get_seq_length() == len(PROMPT)


@pytest.fixture
def make_rotary(architectures):
    def make():
        config = AutoConfig.for_model("llama", **architectures["llama"])
        return LlamaRotaryEmbedding(config)

    return make


@pytest.mark.parametrize("piece", [1, 7, 16, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_angles_are_those_of_the_module_and_computed_once(make_rotary, monkeypatch, dtype, piece):
    monkeypatch.setattr(fast_decoder, "PIECE", piece)
    module, plain, computed = make_rotary(), make_rotary(), []
    angles, forward = Angles(module), module.forward

    def recorded(hidden, positions):
        computed.append(positions[0].tolist())
        return forward(hidden, positions)

    monkeypatch.setattr(module, "forward", recorded)
    hidden = torch.zeros(3, 32, dtype=dtype)
    every = plain(hidden, torch.arange(20 * piece)[None])
    for positions in ([0, 1, 0], [piece, 0, 1], [2, piece - 1, 0], [4, 18 * piece, 9 * piece + 1]):
        alone = plain(hidden, torch.tensor([positions]))
        found = angles(hidden, torch.tensor([positions]))
        for ours, theirs, together in zip(found, alone, every, strict=True):
            assert torch.equal(ours, theirs[0])
            assert torch.equal(ours, together[0, positions])
    assert [rows[0] for rows in computed] == list(range(0, 19 * piece, piece))
    assert {len(rows) for rows in computed} == {piece}
