"""Find and load the tokenizer of a model."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ragcache.errors import ConfigError


def load_tokenizer(path_or_id: str, gguf_file: str | None = None) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a hub id, a local folder, or a GGUF file inside either.

    Reading one out of a GGUF file takes seconds. Raises ConfigError when there is none, or when
    it has no Rust implementation: the Python ones hold the interpreter for as long as they work.
    """
    source = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path_or_id, **source)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"cannot load the tokenizer of {path_or_id}: {error}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer of {path_or_id} has no fast (Rust) implementation")
    return tokenizer
