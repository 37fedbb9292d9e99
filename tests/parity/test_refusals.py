"""Models that would be silently wrong are refused, with the reason."""

import pytest
from transformers import AutoConfig
from transformers.models.llama import modeling_llama

from ragcache.engine.support import check_config, prepare_model
from ragcache.errors import UnsupportedModel

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("bloom", {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "positions"),
        ("falcon", {**SMALL, "ffn_hidden_size": 48}, "AttentionInterface"),
        ("falcon", {**SMALL, "alibi": True, "ffn_hidden_size": 48}, "ALiBi"),
        ("mpt", {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4}, "positions"),
        ("mamba", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}, "layers"),
        (
            "qwen3_next",
            {
                **SMALL,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "layer_types": ["linear_attention", "full_attention"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "shared_expert_intermediate_size": 24,
            },
            "linear_attention",
        ),
        (
            "llama4_text",
            {
                **SMALL,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "intermediate_size_mlp": 48,
                "num_local_experts": 2,
                "layer_types": ["chunked_attention", "full_attention"],
            },
            "chunked_attention",
        ),
        ("bart", {"vocab_size": 97, "d_model": 32, "decoder_layers": 2}, "positions by itself"),
    ],
)
def test_refused(tiny_model, name, options, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        prepare_model(tiny_model(name, options))


@pytest.mark.parametrize("widened", [(0,), (1,), (0, 1)], ids=["query", "key", "both"])
def test_queries_keys_and_values_of_different_dtypes_are_refused(tiny_model, monkeypatch, widened):
    def rotate(*args):
        return [x.float() if i in widened else x for i, x in enumerate(plain(*args))]

    plain = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
    with pytest.raises(UnsupportedModel, match="different dtypes"):
        prepare_model(tiny_model("llama", SMALL).bfloat16())


def test_encoder_decoders_are_refused_before_any_weight_is_loaded():
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        check_config(AutoConfig.for_model("t5"))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_turns_with_the_length_of_the_batch_is_refused(kind):
    half = [1.0] * 4
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        parameters |= {"short_factor": half, "long_factor": half}
        parameters |= {"original_max_position_embeddings": 64}
    config = AutoConfig.for_model("llama", **SMALL, rope_parameters=parameters)
    with pytest.raises(UnsupportedModel, match=kind):
        check_config(config)
