from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ragcache.prefix.explain import History
from ragcache.prefix.fingerprint import SPAN, Fingerprint, wire_order
from ragcache.prefix.records import Record
from ragcache.types import Segment

BLOCK = 4
NAMES = ["tools", "system", "messages.0", "messages.9", "messages.10", "generation_prompt"]


def take(tokens: Sequence[int], *segments: Segment) -> Fingerprint:
    return Fingerprint.of(b"namespace", tokens, segments, BLOCK)


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(length)]


@pytest.mark.parametrize("token", [0, 1, 15, 16, 17, 500, 998, 999])
def test_prompts_begin_alike_up_to_the_first_difference(token):
    before = text(1_000)
    changed = before.copy()
    changed[token] ^= 1
    assert take(before).common(take(changed)) == (token, True)
    assert take(before).common(take(before[:token])) == (token, True)
    assert take(before).common(take(before)) == (1_000, True)


def test_a_difference_that_the_low_bytes_hide_is_placed_before_its_span():
    before = text(40)
    changed = before.copy()
    changed[21] += 256
    assert take(before).common(take(changed)) == (16, False)


@pytest.mark.parametrize(("again", "resumes"), [(19, False), (20, True)])
def test_a_window_and_a_block_have_to_be_equal_again(again, resumes):
    before = text(40)
    after = [*before[:7], *text(9, seed=1), *before[8 : 8 + again], *text(9, seed=2)]
    assert take(after).resumes(take(before), 7) == resumes


def test_text_from_before_the_difference_does_not_count_as_equal_again():
    before = text(40)
    assert not take([*before, *text(40, seed=1)]).resumes(take([*before, *before]), 40)


def test_spans_before_a_segment_s_end_decide_its_prefix():
    tokens = text(80)
    ends = [Segment("system", 0, 36), Segment("messages.0", 36, 80)]
    prefixes = take(tokens, *ends).prefixes
    assert len(prefixes) == 2
    assert take([*tokens[:32], *text(48, seed=1)], *ends).prefixes[0] == prefixes[0]
    assert take([*tokens[:31], *text(49, seed=1)], *ends).prefixes[0] != prefixes[0]
    assert take([*tokens[:32], *text(48, seed=1)], *ends).prefixes[1] != prefixes[1]


def test_segments_are_unpacked_as_they_were():
    segments = [Segment("system", 0, 36), Segment("messages.0", 40, 80)]
    assert list(take(text(80), *segments).segments) == segments
    assert list(take(text(80)).segments) == []


def test_segments_are_sorted_as_they_go_over_the_wire():
    shuffled = random.Random(0).sample(NAMES, len(NAMES))
    assert sorted(shuffled, key=wire_order) == NAMES


def test_no_token_is_kept():
    """A record has a byte for each token, and eight for each span: too few to spell them."""
    tokens = [*range(60_000, 60_400)]
    history = History(BLOCK)
    prompt = history.fingerprint(b"namespace", tokens, [Segment("prompt", 0, len(tokens))], 0)
    history.remember("a", prompt, history.compare(prompt, 0))
    history.computed("a", kept=[(100, 60.0)])
    (record,) = history._records._by_id.values()
    assert record.prompt.lane == bytes(token & 255 for token in tokens)
    assert len(record.prompt.hashes) == 8 * len(tokens) // (SPAN * BLOCK)
    assert len(record.prompt.prefixes) == len(record.prompt.names) == 1
    assert len(record.prompt.bounds) == 8
    assert set(Fingerprint.__slots__) == {
        *("namespace", "names", "bounds", "block_size", "lane", "hashes", "prefixes", "generation")
    }
    assert set(Record.__slots__) == {"id", "prompt", "explanation", "cached", "kept"}
