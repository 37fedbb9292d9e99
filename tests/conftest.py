"""What tests of several folders need."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the console script does, before torch
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import pytest
from transformers import PreTrainedTokenizerFast

from ragcache.engine.model import find_model
from ragcache.prompt.loader import load_tokenizer


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerFast:
    """The tokenizer of the embedded model."""
    return load_tokenizer(find_model(None).location)
