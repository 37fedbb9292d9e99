from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from ragcache.errors import ConfigError
from ragcache.prompt.tokenize import PromptTokenizer
from ragcache.prompt.vocabulary import Vocabulary

Prompts = Callable[..., PromptTokenizer]


@settings(deadline=None)
@given(text=st.text("ab 東é😀\n.,", min_size=1, max_size=20))
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(text: str, prompts: Prompts) -> None:
    for family in ("byte_level", "metaspace"):
        vocabulary = prompts(family).vocabulary
        ids = prompts(family).encode_text("a" + text).token_ids
        ids = [id for id in ids if not vocabulary.is_skipped(id)]
        read = b"".join(map(vocabulary.token_bytes, ids)).decode()
        assert read.removeprefix(" ") == "a" + text


def test_a_part_of_a_character_reads_as_a_replacement_with_its_real_bytes(
    smollm2_prompts: PromptTokenizer,
) -> None:
    ids = smollm2_prompts.encode_text("𓀀").token_ids
    assert len(ids) > 1
    texts, raw = zip(*map(smollm2_prompts.vocabulary.token_text, ids), strict=True)
    assert b"".join(raw).decode() == "𓀀"
    assert texts[0] == "\ufffd"


def test_a_word_keeps_the_space_before_it(prompts: Prompts, family: str) -> None:
    ids = prompts(family).encode_text("the dog").token_ids
    read = "".join(prompts(family).vocabulary.token_text(id)[0] for id in ids[-5:])
    assert read.endswith(" dog")


def test_special_tokens_read_as_their_names(smollm2_prompts: PromptTokenizer, smollm2: Any) -> None:
    token_id = smollm2.convert_tokens_to_ids("<|im_end|>")
    assert smollm2_prompts.vocabulary.token_text(token_id) == ("<|im_end|>", b"<|im_end|>")


def test_an_unknown_id_reads_as_nothing(smollm2_prompts: PromptTokenizer) -> None:
    assert smollm2_prompts.vocabulary.token_text(10**6) == ("", b"")


def test_a_decoder_that_works_on_after_the_bytes_is_refused(build: Any) -> None:
    tokenizer = copy.deepcopy(build("byte_level", "chatml").backend_tokenizer)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 0, 1)])
    with pytest.raises(ConfigError, match="Strip"):
        Vocabulary(tokenizer)
