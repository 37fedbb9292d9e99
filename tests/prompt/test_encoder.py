from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.prompt.control import ControlTokens
from ragcache.prompt.encoder import Encoder
from ragcache.prompt.memo import EncodingMemo
from ragcache.prompt.tokenize import PromptTokenizer

Build = Callable[[str, str], Any]


def make_encoder(build: Build, family: str, *specials: str) -> Encoder:
    tokenizer = build(family, "chatml").backend_tokenizer
    return Encoder(tokenizer, ControlTokens(hidden=specials), "".join(specials))


@pytest.mark.parametrize(
    ("name", "specials"),
    [
        ("byte_level", ("<|im_start|>", "<|im_end|>")),
        ("prepending", ("<s>", "</s>")),
        ("metaspace", ("<s>", "</s>")),  # treats the start of a text differently
        ("unigram", ("<s>", "</s>")),
        ("wordpiece", ("<s>", "</s>")),
    ],
)
def test_pieces_encode_to_what_the_whole_encodes_to(
    name: str, specials: tuple[str, ...], build: Build
) -> None:
    encoder = make_encoder(build, name, *specials)
    backend = build(name, "chatml").backend_tokenizer
    words = st.sampled_from([*specials, " ", "\n", "the dog", " isn't", "é", "  ", "1", "▁", "s>"])

    @settings(deadline=None)
    @given(st.lists(words, max_size=15).map("".join))
    def check(text: str) -> None:
        assert encoder.encode(text) == backend.encode(text, add_special_tokens=False).ids

    check()


def test_a_growing_conversation_encodes_only_what_is_new(
    smollm2_prompts: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = smollm2_prompts._encoder
    encoded: list[str] = []
    encode = encoder._remembered._encode
    monkeypatch.setattr(
        encoder._remembered, "_encode", lambda text: encoded.append(text) or encode(text)
    )
    first = "<|im_start|>user\nmany words<|im_end|>\n"
    encoder.encode(first)
    assert "user\nmany words" in encoded
    encoded.clear()
    encoder.encode(first + "<|im_start|>assistant\nnew<|im_end|>\n")
    assert encoded == ["assistant\nnew"]


def test_tokens_that_reach_across_an_end_belong_to_what_follows(
    smollm2_prompts: PromptTokenizer,
) -> None:
    encoder = smollm2_prompts._encoder
    text = "<|im_start|>user\nhello world<|im_end|>"
    assert len(encoder.encode(text)) == 6
    ends = [0, 3, 12, 16, 17, 20, 22, 28, len(text)]
    assert encoder.count_tokens(text, ends) == [0, 0, 1, 2, 3, 3, 4, 5, 6]


def test_the_memo_forgets_the_least_recently_used_and_stays_within_its_bytes() -> None:
    calls: list[str] = []
    memo = EncodingMemo(lambda text: calls.append(text) or [1, 2, 3], max_bytes=700)
    for text in ("a", "b", "a", "c"):  # an entry takes more than 200 bytes: two fit
        assert list(memo(text)) == [1, 2, 3]
    assert calls == ["a", "b", "c"]
    memo("a")
    assert calls == ["a", "b", "c"]
    memo("b")
    assert calls == ["a", "b", "c", "b"]
    memo("x" * 1000)
    memo("x" * 1000)
    assert calls[-2:] == ["x" * 1000] * 2
