from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.prompt.detokenize import Detokenizer
from ragcache.prompt.tokenize import PromptTokenizer
from ragcache.prompt.vocabulary import Vocabulary

Prompts = Callable[..., PromptTokenizer]
quick = settings(max_examples=100, deadline=None)


def stream(vocabulary: Vocabulary, ids: list[int], sizes: list[int]) -> list[str]:
    detokenizer, pieces = Detokenizer.of(vocabulary), []
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    return [*pieces, detokenizer.finish()]


sizes = st.lists(st.integers(0, 4), max_size=30)


@quick
@given(data=st.data(), sizes=sizes)
def test_pieces_join_to_the_decoding_of_the_whole(
    data: st.DataObject, sizes: list[int], family: str, build: Any, prompts: Prompts
) -> None:
    tokenizer = build(family, "chatml")
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=40))
    pieces = stream(prompts(family).vocabulary, ids, sizes)
    assert "".join(pieces) == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)


@quick
@given(data=st.data(), sizes=sizes)
def test_invalid_bytes_join_to_the_decoding_of_the_whole(
    data: st.DataObject, sizes: list[int], build: Any, prompts: Prompts
) -> None:
    for family in ("byte_level", "metaspace"):
        tokenizer, vocabulary = build(family, "chatml"), prompts(family).vocabulary
        byte_ids = [id for id in range(len(tokenizer)) if len(vocabulary.token_bytes(id)) == 1]
        assert len(byte_ids) >= 256
        ids = data.draw(st.lists(st.sampled_from(byte_ids), max_size=20))
        pieces = stream(vocabulary, ids, sizes)
        assert "".join(pieces) == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)


@quick
@given(text=st.text(max_size=40), sizes=sizes)
def test_no_character_is_ever_split(
    text: str, sizes: list[int], smollm2_prompts: PromptTokenizer
) -> None:
    vocabulary = smollm2_prompts.vocabulary
    ids = smollm2_prompts.encode_text("x" + text).token_ids
    pieces = stream(vocabulary, ids, sizes)
    assert "".join(pieces) == vocabulary.decode(ids)
    if "\ufffd" not in vocabulary.decode(ids):  # a few bytes have no token in this vocabulary
        assert not any("\ufffd" in piece for piece in pieces)


@quick
@given(ids=st.lists(st.integers(0, 49151), max_size=60), sizes=sizes)
def test_the_embedded_models_tokens_join_to_their_decoding(
    ids: list[int], sizes: list[int], smollm2: Any, smollm2_prompts: PromptTokenizer
) -> None:
    pieces = stream(smollm2_prompts.vocabulary, ids, sizes)
    assert "".join(pieces) == smollm2.decode(ids, skip_special_tokens=True)


def test_complete_text_is_not_kept_back(smollm2_prompts: PromptTokenizer) -> None:
    for word in ("hello", " wörld", " 東", "\n"):
        ids = smollm2_prompts.encode_text(word).token_ids
        assert Detokenizer.of(smollm2_prompts.vocabulary).push(ids) == word


def test_a_window_does_not_grow_with_the_text(prompts: Prompts, build: Any) -> None:
    tokenizer = build("metaspace", "chatml").backend_tokenizer
    longest = 0

    class Counting(Vocabulary):
        def decode(self, token_ids: Any) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return super().decode(token_ids)

    ids = tokenizer.encode("the lazy dog " * 100).ids
    assert len(ids) > 200
    stream(Counting(tokenizer), ids, [1] * len(ids))
    assert longest <= 3


@pytest.mark.parametrize("family", ["byte_level", "metaspace"])
def test_special_tokens_can_be_made_visible(family: str, build: Any, prompts: Any) -> None:
    tokenizer = build(family, "chatml")
    vocabulary = prompts(family).vocabulary
    shown, hidden = ("<|im_start|>", "<|im_end|>") if family == "byte_level" else ("<s>", "</s>")
    words = tokenizer.encode("the fox", add_special_tokens=False)
    ids = [*words, *tokenizer.convert_tokens_to_ids([shown, hidden]), *words]
    pieces = [Detokenizer.of(vocabulary), Detokenizer.of(vocabulary, {shown})]
    plain, visible = (each.push(ids) + each.finish() for each in pieces)
    assert (shown in plain, hidden in plain) == (False, False)
    assert (shown in visible, hidden in visible) == (True, False)
    assert visible.replace(shown, "") == plain
