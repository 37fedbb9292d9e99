from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from ragcache.prompt.control import ControlTokens
from ragcache.prompt.encoder import Encoder, Piece
from ragcache.prompt.memo import EncodingMemo
from ragcache.prompt.tokenize import PromptTokenizer

Build = Callable[[str, str], Any]


def encode(encoder: Encoder, text: str) -> list[int]:
    return [id for piece in encoder.pieces(text) for id in piece.ids]


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
        assert encode(encoder, text) == backend.encode(text, add_special_tokens=False).ids

    check()


def test_a_growing_conversation_encodes_only_what_is_new(
    smollm2_prompts: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = smollm2_prompts._encoder
    encoded: list[str] = []
    original = encoder._remembered._encode
    monkeypatch.setattr(
        encoder._remembered, "_encode", lambda text: encoded.append(text) or original(text)
    )
    first = "<|im_start|>user\nmany words<|im_end|>\n"
    encoder.pieces(first)
    assert "user\nmany words" in encoded
    encoded.clear()
    encoder.pieces(first + "<|im_start|>assistant\nnew<|im_end|>\n")
    assert encoded == ["assistant\nnew"]


def test_tokens_that_reach_across_an_end_belong_to_what_follows(
    smollm2_prompts: PromptTokenizer,
) -> None:
    encoder = smollm2_prompts._encoder
    text = "<|im_start|>user\nhello world<|im_end|>"
    pieces = encoder.pieces(text)
    assert sum(len(piece.ids) for piece in pieces) == 6
    ends = [0, 3, 12, 16, 17, 20, 22, 28, len(text)]
    assert encoder.count_tokens(pieces, ends) == [0, 0, 1, 2, 3, 3, 4, 5, 6]


def test_places_in_a_text_are_found_without_encoding_it_again(
    smollm2_prompts: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = smollm2_prompts._encoder
    pieces = encoder.pieces("<|im_start|>user\nfound once<|im_end|>")
    counts = encoder.count_tokens(pieces, [20, 22])
    monkeypatch.setattr(encoder, "_tokenizer", None)
    assert encoder.count_tokens(pieces, [20, 22]) == counts
    assert encoder.find_character(pieces, 3) == len("<|im_start|>user\n")


def test_every_token_begins_where_the_text_of_the_tokens_before_it_ends(
    smollm2_prompts: PromptTokenizer,
) -> None:
    encoder, token_bytes = smollm2_prompts._encoder, smollm2_prompts.vocabulary.token_bytes
    words = st.sampled_from(
        ["<|im_start|>", " ", "\n", "dog", " isn't", "é", "東京", "😀", "  ", ".\n\n"]
    )
    contents = st.lists(words | st.just("<|im_end|>").map(encoder._control.mark), max_size=12)

    @settings(deadline=None)
    @given(contents.map("".join))
    def check(rendered: str) -> None:
        pieces = encoder.pieces(rendered)
        before = b""
        for token, (id, data_start) in enumerate(tokens_of(pieces)):
            whole = before.decode("utf-8", "ignore")  # a character is where its first byte is
            expected = len(whole) if data_start is None else data_start
            assert encoder.find_character(pieces, token) == expected
            before += token_bytes(id)
        assert encoder.find_character(pieces, len(encode(encoder, rendered))) == len(
            before.decode()
        )

    check()


def tokens_of(pieces: list[Piece]) -> Iterator[tuple[int, int | None]]:
    """Each token; for those of a control token that is data, where that starts."""
    start = 0
    for piece in pieces:
        for id in piece.ids:
            yield id, start if piece.anchor is None else None
        start += len(piece.text)


def test_white_space_belongs_to_the_token_that_it_is_part_of(build: Build) -> None:
    tokenizer = copy.deepcopy(build("byte_level", "chatml"))
    trimming = [processors.ByteLevel(trim_offsets=True), processors.ByteLevel(trim_offsets=True)]
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(trimming)
    prompts = PromptTokenizer(tokenizer)
    pieces = prompts._encoder.pieces("the dog")
    ids = pieces[0].ids
    lengths = [len(prompts.vocabulary.token_bytes(id)) for id in ids]
    starts = list(accumulate(lengths, initial=0))
    assert " dog" in {prompts.vocabulary.token_text(id)[0] for id in ids}
    assert [prompts._encoder.find_character(pieces, i) for i in range(len(starts))] == starts
    assert prompts._encoder.count_tokens(pieces, starts) == list(range(len(starts)))


@pytest.mark.parametrize("name", ["metaspace", "prepending", "unigram"])
def test_what_goes_before_a_text_to_encode_it_does_not_shift_its_places(
    name: str, build: Build
) -> None:
    encoder = make_encoder(build, name, "<s>", "</s>")
    marked = encoder._control.mark("the</s>dog")
    pieces = encoder.pieces(marked)
    first, data, last = (len(piece.ids) for piece in pieces)
    assert encoder.find_character(pieces, first + data) == len("the</s>")
    assert encoder.find_character(pieces, first + data + last) == len("the</s>dog")
    ends = [len(marked) - 3, len(marked)]
    assert encoder.count_tokens(pieces, ends) == [first + data, first + data + last]


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
