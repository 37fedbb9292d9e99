"""What tests of several folders need."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the console script does, before torch
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ragcache.engine.source import find_model
from ragcache.prompt.loader import load_tokenizer


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerFast:
    """The tokenizer of the embedded model."""
    return load_tokenizer(find_model(None).location)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory, smollm2) -> Path:
    """A folder with a random model of two layers and the embedded model's tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(smollm2),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    folder: Path = tmp_path_factory.mktemp("tiny-llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    smollm2.save_pretrained(folder)
    return folder
