"""Find and load the tokenizer of a model."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ragcache.errors import ConfigError


def load_tokenizer(path_or_id: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a hub id or a local folder.

    Raises ConfigError when there is none, or when it has no Rust implementation: the Python ones
    hold the interpreter for as long as they work.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path_or_id)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"cannot load the tokenizer of {path_or_id}: {error}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer of {path_or_id} has no fast (Rust) implementation")
    return tokenizer
