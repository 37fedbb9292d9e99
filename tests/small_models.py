"""Models of two layers and random weights, for tests that look at what is made of a model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def small_model(
    kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """The same weights for the same arguments; `changes` are to the configuration."""
    config = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    read = AutoConfig.for_model(kind, **{**config, **changes})
    return AutoModelForCausalLM.from_config(read, dtype=dtype).eval()
