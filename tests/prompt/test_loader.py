from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ragcache.errors import ConfigError
from ragcache.prompt.loader import load_tokenizer


def test_a_local_folder_loads(build: Any, tmp_path: Path) -> None:
    tokenizer = build("byte_level", "chatml")
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("the dog")["input_ids"] == tokenizer("the dog")["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template


def test_the_embedded_models_gguf_has_tokenizer_and_template(smollm2: Any) -> None:
    assert smollm2.is_fast
    assert "<|im_start|>" in smollm2.chat_template
    assert smollm2.convert_tokens_to_ids("<|im_end|>") == smollm2.eos_token_id == 2


def test_a_folder_without_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_in_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        is_fast = False

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: Slow())
    with pytest.raises(ConfigError, match="no fast"):
        load_tokenizer("some/model")
