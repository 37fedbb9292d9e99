"""What a tenant's prompts came to: totals, windows, segments, the past ten minutes."""

from __future__ import annotations

import random

import pytest

from ragcache.metrics.hit_rate import HitRate
from ragcache.metrics.slots import Slots
from ragcache.metrics.tally import Tally, percentile
from ragcache.types import Explanation, MissReason, Segment


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tally(clock):
    return Tally(clock)


def test_a_hit_rate_forgets_what_lies_outside_its_window(clock):
    rate = HitRate(clock)
    assert rate.over(60) is None
    rate.add(100, 100)
    clock.now += 30
    rate.add(100, 0)
    rate.add(200, 50)
    assert rate.over(60) == 150 / 400
    clock.now += 31
    assert rate.over(60) == 50 / 300
    assert rate.over(300) == 150 / 400
    clock.now += 270
    rate.add(10, 0)
    assert rate.over(60) == 0
    assert rate.over(300) == 0
    clock.now += 301
    assert rate.over(300) is None
    assert (rate.total.query, rate.total.hit) == (410, 150)


def test_a_line_of_slots_has_gaps_where_nothing_came_and_ends_now(clock):
    slots = Slots(2, 4, list, clock)
    assert slots.line() == [None] * 4
    slots.now().append("a")
    clock.now += 1.9
    slots.now().append("b")
    clock.now += 4
    slots.now().append("c")
    assert slots.line() == [None, ["a", "b"], None, ["c"]]
    clock.now += 2
    assert slots.line() == [["a", "b"], None, ["c"], None]
    clock.now += 20
    assert slots.line() == [None] * 4


def test_a_hit_covers_the_segments_in_front_and_part_of_one(tally):
    segments = [
        Segment("tools", 0, 30),
        Segment("system", 30, 50),
        Segment("messages.1", 50, 70),
        Segment("messages.2", 70, 90),
        Segment("generation_prompt", 90, 94),
    ]
    for hit_tokens in (0, 40, 80):
        tally.prompt(segments, hit_tokens)
    assert {name: (each.total.query, each.total.hit) for name, each in tally.segments.items()} == {
        "tools": (90, 60),
        "system": (60, 30),
        "messages": (132, 30),
        "prompt": (0, 0),
    }


def test_segments_add_up_to_the_whole_in_every_window(tally, clock):
    rng = random.Random(0)
    names = ["tools", "system", "messages.1", "messages.2", "generation_prompt"]
    for _ in range(200):
        ends = sorted(rng.randrange(500) for _ in names)
        segments = list(map(Segment, names, [0, *ends], ends))
        if rng.random() < 0.2:
            segments = [Segment("prompt", 0, ends[-1])]
        tally.prompt(segments, rng.randrange(ends[-1] + 1))
        clock.now += rng.random() * 4
    for total in ("query", "hit"):
        parts = [getattr(each.total, total) for each in tally.segments.values()]
        assert sum(parts) == getattr(tally.whole.total, total) > 0
    history = [hits.query for hits in tally.history.line() if hits]
    assert sum(history) == tally.whole.total.query
    rates = [each.over(60) for each in tally.segments.values()]
    assert min(rates) <= tally.whole.over(60) <= max(rates)


def test_the_history_tells_the_median_and_the_slow_ones(tally, clock):
    waits = [number / 100 for number in range(1, 101)]
    random.Random(0).shuffle(waits)
    for seconds in waits:
        tally.first_token(seconds)
    clock.now += 10
    tally.first_token(3.0)
    *_, nothing, before, now = tally.waits.line()
    assert nothing is None
    assert (percentile(before, 50), percentile(before, 95)) == (0.5, 0.95)
    assert (percentile(now, 50), percentile(now, 95)) == (3.0, 3.0)
    assert percentile([], 50) is None


def test_only_the_latest_misses_are_kept_and_no_hits(tally, clock):
    tally.explained("hit", Explanation(10, 8))
    for number in range(60):
        clock.now += 1
        tally.explained(f"miss-{number}", Explanation(10, 0, MissReason.COLD))
    assert [miss.request_id for miss in tally.misses] == [f"miss-{n}" for n in range(10, 60)]
    assert tally.misses[-1].at == clock.now
