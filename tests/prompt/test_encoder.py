from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors

from ragcache.prompt.control import ControlTokens
from ragcache.prompt.encoder import Encoder, Piece
from ragcache.prompt.memo import EncodingMemo
from ragcache.prompt.tokenize import PromptTokenizer
from ragcache.prompt.vocabulary import Vocabulary

Build = Callable[[str, str], Any]


def encode(encoder: Encoder, text: str) -> list[int]:
    return [id for piece in encoder.pieces(text) for id in piece.ids]


def make_encoder(build: Build, family: str, *specials: str) -> Encoder:
    tokenizer = build(family, "chatml").backend_tokenizer
    control = ControlTokens(hidden=specials)
    return Encoder(tokenizer, Vocabulary(tokenizer), control, "".join(specials))


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
    longer = first + "<|im_start|>assistant\nnew<|im_end|>\n"
    new = len("assistant\nnew")
    assert encoder.pieces_at_hand(longer, new - 1) is None
    assert encoded == []
    assert encoder.pieces_at_hand(longer, new) == encoder.pieces(longer)
    assert encoded == ["assistant\nnew"]
    assert encoder.pieces_at_hand(longer, 0) == encoder.pieces(longer)
    assert encoder.pieces_at_hand(longer, new, scope="of nobody else") is None


def test_tokens_that_reach_across_an_end_belong_to_what_follows(
    smollm2_prompts: PromptTokenizer,
) -> None:
    encoder = smollm2_prompts._encoder
    text = "<|im_start|>user\nhello world<|im_end|>"
    pieces = encoder.pieces(text)
    assert sum(len(piece.ids) for piece in pieces) == 6
    ends = [0, 3, 12, 16, 17, 20, 22, 28, len(text)]
    assert encoder.count_tokens(pieces, ends) == [0, 0, 1, 2, 3, 3, 4, 5, 6]


def test_places_in_byte_level_text_are_found_without_encoding_it_again(
    smollm2_prompts: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = smollm2_prompts._encoder
    pieces = encoder.pieces("<|im_start|>user\nfound once\n<|im_end|>")
    raw_ids = encoder.encode_raw("so is 東京")
    monkeypatch.setattr(encoder, "_tokenizer", None)
    assert encoder.count_tokens(pieces, [17, 22, 27, 28]) == [3, 4, 5, 6]
    assert encoder.find_character(pieces, 3) == len("<|im_start|>user\n")
    assert encoder.find_raw_character("so is 東京", raw_ids, 2) == len("so is")


def test_places_in_other_text_are_remembered_in_their_scope(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make_encoder(build, "wordpiece", "<s>", "</s>")
    encoded: list[str] = []
    original = encoder._remembered_spans._encode
    monkeypatch.setattr(
        encoder._remembered_spans, "_encode", lambda text: encoded.append(text) or original(text)
    )
    pieces = encoder.pieces("the dog")
    for scope in ("a", "b", "a", "b"):
        assert encoder.count_tokens(pieces, [3], scope) == [1]
        assert encoder.find_character(pieces, 1, scope) == 3
    assert encoded == ["the dog"] * 2


def variants(build: Build) -> Iterator[Tokenizer]:
    """All families, and byte-level ones whose tokens are not always the bytes of the text."""
    for family in ("byte_level", "metaspace", "prepending", "unigram", "wordpiece"):
        yield build(family, "chatml").backend_tokenizer
    for normalizer in (normalizers.NFC(), normalizers.NFKC()):
        tokenizer = copy.deepcopy(build("byte_level", "chatml").backend_tokenizer)
        tokenizer.normalizer = normalizer
        yield tokenizer
    tokenizer = copy.deepcopy(build("byte_level", "chatml").backend_tokenizer)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    yield tokenizer


def test_places_told_by_bytes_are_those_that_encoding_again_tells(build: Build) -> None:
    control = ControlTokens(hidden=["<|im_end|>", "</s>"])
    borders = "<|im_start|><|im_end|><s></s>"
    pairs = []
    for tokenizer in variants(build):
        encoders = [Encoder(tokenizer, Vocabulary(tokenizer), control, borders) for _ in range(2)]
        encoders[1]._offsets._is_known = False
        pairs.append(encoders)
    words = ["<|im_start|>", "<|im_end|>", "</s>", " ", "\n", "dog", " isn't", "é", "e\u0301"]
    words += ["東京", "😀", "  ", ".\n\n", "\u0958", "\u212b", "ﬁ", "▁", "☃", "\u0301", "\ufdd1"]
    texts = st.lists(st.sampled_from([*words, *map(control.mark, words)]), max_size=8)

    @settings(deadline=None)
    @given(texts.map("".join), st.data())
    def check(text: str, data: st.DataObject) -> None:
        ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        for by_bytes, by_spans in pairs:
            pieces = by_bytes.pieces(text)
            assert by_bytes.count_tokens(pieces, ends) == by_spans.count_tokens(pieces, ends)
            for token in range(sum(len(piece.ids) for piece in pieces) + 1):
                found = by_bytes.find_character(pieces, token)
                assert found == by_spans.find_character(pieces, token)
            ids = by_bytes.encode_raw(text)
            for token in range(len(ids) + 1):
                found = by_bytes.find_raw_character(text, ids, token)
                assert found == by_spans.find_raw_character(text, ids, token)

    check()


def test_tokens_that_are_added_around_raw_text_are_at_its_ends(build: Build) -> None:
    tokenizer = copy.deepcopy(build("byte_level", "chatml").backend_tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eot|>", special_tokens=[("<|bos|>", 0), ("<|eot|>", 5)]
    )
    encoder = Encoder(tokenizer, Vocabulary(tokenizer), ControlTokens(hidden=[]), "")
    ids = encoder.encode_raw("the dog")
    encoder._tokenizer = None
    places = [encoder.find_raw_character("the dog", ids, token) for token in range(len(ids))]
    assert (places[:2], places[-1]) == ([0, 0], len("the dog"))
    assert places == sorted(places)


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
    memo = EncodingMemo(lambda text: calls.append(text) or [1, 2, 3], max_bytes=9 * 380)
    texts = list("abcdefghi")  # an entry takes some 360 bytes: nine fit
    for text in (*texts, "a", "j"):
        assert list(memo(text)) == [1, 2, 3]
    assert calls == [*texts, "j"]
    memo("a")
    assert calls == [*texts, "j"]
    memo("b")
    assert calls == [*texts, "j", "b"]


def test_a_text_that_would_fill_the_memo_is_not_kept_and_drives_nothing_out() -> None:
    calls: list[str] = []
    memo = EncodingMemo(lambda text: calls.append(text) or [1], max_bytes=8000)
    for text in ("a", "x" * 1000, "a", "x" * 1000):
        memo(text)
    assert calls == ["a", "x" * 1000, "x" * 1000]


def test_what_was_encoded_in_one_scope_is_encoded_again_in_another() -> None:
    calls: list[str] = []
    memo = EncodingMemo(lambda text: calls.append(text) or [1])
    for text, scope in (("bc", "a"), ("bc", "b"), ("c", "ab"), ("bc", "a"), ("bc", "b")):
        assert list(memo(text, scope)) == [1]
    assert calls == ["bc", "bc", "c"]
