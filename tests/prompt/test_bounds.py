from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ragcache.prompt.bounds import LengthBound

any_text = st.text(max_size=60) | st.text("aé\u0301 \n\t\x04\x00", max_size=60)


@pytest.fixture(scope="module")
def bounded(build: Any, family: str, smollm2: Any) -> list[tuple[Tokenizer, LengthBound]]:
    tokenizers = [build(family, "chatml").backend_tokenizer, smollm2.backend_tokenizer]
    return [(tokenizer, LengthBound(tokenizer)) for tokenizer in tokenizers]


@settings(deadline=None)
@given(text=any_text)
def test_no_text_has_fewer_tokens_than_the_bound(
    text: str, bounded: list[tuple[Tokenizer, LengthBound]]
) -> None:
    for tokenizer, bound in bounded:
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert bound.min_tokens(text) <= num_tokens


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "prepending"])
def test_a_long_text_has_a_bound(name: str, build: Any) -> None:
    assert LengthBound(build(name, "chatml").backend_tokenizer).min_tokens("a" * 10**5) > 1000


def test_characters_without_tokens_do_not_count(smollm2: Any) -> None:
    backend = smollm2.backend_tokenizer
    assert backend.encode("\x04" * 10, add_special_tokens=False).ids == []
    assert LengthBound(backend).min_tokens("\x04" * 10**5) == 0
    assert LengthBound(backend).min_tokens("a" * 10**5) > 1000


@pytest.mark.parametrize("name", ["unigram", "wordpiece"])
def test_nothing_is_certain_where_text_can_shrink(name: str, build: Any) -> None:
    assert LengthBound(build(name, "chatml").backend_tokenizer).min_tokens("a" * 10**5) == 0
