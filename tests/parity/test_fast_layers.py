"""Which layers run fused, and which must not; that their logits are right is tested for all."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from ragcache_kernels import get_backend
from ragcache_kernels.torch_backend import TorchBackend
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from ragcache.engine.fast_model import use_fast_layers
from ragcache.engine.model import fingerprint
from ragcache.engine.support import prepare_model

PROMPT = [5, 17, 40, 8, 8, 61, 33, 90, 12, 7, 77, 25, 50]
FUSED = {"gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", "smollm3"}


def test_the_common_families_run_fused_and_no_other(pair, monkeypatch):
    calls = {"packed": 0, "split": 0}

    def rotate_and_write(self, qkv, rotation, cache, plan):
        calls["packed"] += 1
        return original(self, qkv, rotation, cache, plan)

    def write_kv(self, key, value, cache, plan):
        calls["split"] += 1
        write(self, key, value, cache, plan)

    original, write = TorchBackend.rotate_and_write, TorchBackend.write_kv
    monkeypatch.setattr(TorchBackend, "rotate_and_write", rotate_and_write)
    monkeypatch.setattr(TorchBackend, "write_kv", write_kv)
    pair.run(pair.engine(), {"a": PROMPT}, 1)
    name = pair.plain.config.model_type
    rotating = {"smollm3": 1}.get(name, 2 if name in FUSED else 0)
    assert pair.fast_layers == (2 if name in FUSED else 0)
    assert calls == {"packed": rotating, "split": 2}  # torch writes what it has rotated


@pytest.mark.parametrize("name", sorted(FUSED))
def test_parameters_share_the_memory_of_the_fused_products(make_pair, name):
    pair = make_pair(name)
    layer, plain = (model.get_decoder().layers[1] for model in (pair.paged, pair.plain))
    for parts in (
        [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
        [layer.mlp.gate_proj, layer.mlp.up_proj],
    ):
        assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
        size = parts[0].weight.untyped_storage().nbytes()
        assert size == sum(part.weight.nbytes for part in parts)
    ours, theirs = layer.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert fingerprint(pair.paged, torch.float32) == fingerprint(pair.plain, torch.float32)


def test_outside_of_a_step_a_fused_model_is_the_plain_one(make_pair):
    pair = make_pair("llama")
    pair.paged.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = pair.paged(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    assert torch.equal(logits, pair.reference(PROMPT))


def check(pair, fast_layers):
    """The answers are right, with so many layers fused."""
    assert pair.fast_layers == fast_layers
    engine = pair.engine(max_batch_tokens=5)
    pair.run(engine, {"a": PROMPT}, 3)
    pair.check_logits(engine)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"head_dim": 12}),
        ("qwen3", {"attention_bias": True}),
        ("gemma3_text", {"hidden_activation": "silu"}),
    ],
)
def test_variants_of_the_families_run_fused(make_pair, name, options):
    check(make_pair(name, **options), 2)


@pytest.mark.parametrize("options", [{"mlp_bias": True}, {"hidden_act": "gelu"}], ids=str)
def test_what_the_kernels_cannot_do_is_left_alone(make_pair, options):
    check(make_pair("llama", **options), 0)


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_a_hook(layer):
    layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: 1.5 * output)


def with_another_linear(layer):
    layer.mlp.up_proj.__class__ = Doubling


def with_another_parameter(layer):
    weight = layer.self_attn.o_proj.weight
    layer.self_attn.o_proj.weight = type("Quantised", (nn.Parameter,), {})(weight.data)


def with_another_dtype(layer):
    layer.mlp.down_proj.to(torch.float64)
    layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: args[0].double())
    layer.mlp.down_proj.register_forward_hook(lambda module, args, output: output.float())


@pytest.mark.parametrize(
    "alter", [with_a_hook, with_another_linear, with_another_parameter, with_another_dtype]
)
def test_a_layer_to_which_something_was_done_is_left_alone(make_pair, alter):
    check(make_pair("llama", alter=lambda model: alter(model.get_decoder().layers[1])), 1)


def test_a_layer_that_gives_something_else_is_left_alone(make_pair, monkeypatch, caplog):
    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 1.01 * plain(self, x))
    with caplog.at_level(logging.WARNING):
        pair = make_pair("llama")
    assert caplog.messages == 2 * ["LlamaDecoderLayer does not run fused: its results would differ"]
    check(pair, 0)


def rename(name, new_name):
    """Call a part of the layers, or of their parts, something else."""

    def alter(model):
        for module in list(model.modules()):
            if name in module._modules:
                setattr(module, new_name, module._modules.pop(name))

    return alter


def mlp_forward(self, x):
    return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def layer_forward(self, hidden_states, **options):
    update, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
    hidden_states = hidden_states + update
    return hidden_states + self.mlp(self.mlp_layernorm(hidden_states))


@pytest.mark.parametrize(
    ("module", "forward", "name", "new_name"),
    [
        (LlamaMLP, mlp_forward, "act_fn", "activation"),
        (LlamaDecoderLayer, layer_forward, "post_attention_layernorm", "mlp_layernorm"),
    ],
)
def test_a_layer_whose_parts_have_other_names_is_left_alone(
    make_pair, monkeypatch, caplog, module, forward, name, new_name
):
    monkeypatch.setattr(module, "forward", forward)
    with caplog.at_level(logging.WARNING):
        pair = make_pair("llama", alter=rename(name, new_name))
    assert len(caplog.messages) == 2
    assert all("does not run fused: " in line and name in line for line in caplog.messages)
    check(pair, 0)


def test_layers_are_tried_with_the_kernels_that_will_run_them(make_pair, monkeypatch):
    plain = make_pair("qwen3").plain
    model = copy.deepcopy(plain)
    prepare_model(model)
    assert use_fast_layers(model, get_backend("triton")) == 2

    def wrong(self, qkv, rotation, cache, plan):
        return 1.05 * original(self, qkv, rotation, cache, plan)

    original = TorchBackend.rotate_and_write
    monkeypatch.setattr(TorchBackend, "rotate_and_write", wrong)
    model = copy.deepcopy(plain)
    prepare_model(model)
    assert use_fast_layers(model, get_backend("torch")) == 0
