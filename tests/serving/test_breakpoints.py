"""Cache markers in tokens: what they write, keep and find, in whole blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.serving.breakpoints import PlacedBreakpoints
from ragcache.types import Breakpoint

BLOCK = 16


def placed(*marks):
    """Markers as (position, ttl)."""
    breakpoints = [Breakpoint(0, ttl=ttl) for _, ttl in marks]
    return PlacedBreakpoints(breakpoints, [position for position, _ in marks], BLOCK)


def test_what_lies_between_two_markers_belongs_to_the_second():
    marks = placed((40, "1h"), (100, "5m"))
    assert marks.written(0) == {"1h": 32, "5m": 64}
    assert marks.written(16) == {"1h": 16, "5m": 64}
    assert marks.written(48) == {"5m": 48}
    assert marks.written(96) == {}


def test_a_marker_within_the_first_block_writes_nothing():
    marks = placed((15, "5m"))
    assert marks.written(0) == {}
    assert list(marks.outcomes(0)) == [("explicit", "too_short")]
    assert placed((16, "5m")).written(0) == {"5m": 16}


def test_outcomes_tell_found_from_new():
    marks = placed((40, "5m"), (100, "5m"))
    assert [outcome for _, outcome in marks.outcomes(48)] == ["hit", "miss"]


def test_a_marker_covers_those_before_it():
    """Where a template writes the tools behind the system text, say."""
    marks = placed((100, "1h"), (40, "5m"))
    assert marks.written(0) == {"1h": 96}
    assert marks.reach == 100


def test_a_marker_in_a_message_covers_tools_that_the_template_writes_behind_it():
    tools, system = Breakpoint(None, ttl="1h"), Breakpoint(0, ttl="5m")
    marks = PlacedBreakpoints([system], [40], BLOCK, tools_end=80)
    assert marks.written(0) == {"5m": 80}
    assert PlacedBreakpoints([tools], [40], BLOCK, tools_end=80).written(0) == {"1h": 32}


def test_a_marker_without_a_place_counts_for_nothing():
    marks = placed((None, "1h"), (32, "5m"))
    assert marks.written(0) == {"5m": 32}
    assert marks.retentions() == ((32, 300.0),)
    assert placed((None, "1h")).reach == 0


def test_only_markers_with_a_lifetime_retain():
    marks = placed((32, "1h"), (64, "auto"))
    assert marks.retentions() == ((32, 3600.0),)
    assert marks.written(0) == {"1h": 32, "auto": 32}


@pytest.mark.parametrize("hit", [0, 16, 160])
@given(marks=st.lists(st.tuples(st.integers(0, 150), st.sampled_from(["5m", "1h", "30m"]))))
def test_hits_and_writes_end_at_the_last_whole_block(hit, marks):
    several = placed(*marks)
    reach = several.reach // BLOCK * BLOCK
    assert hit + sum(several.written(hit).values()) == max(hit, reach)
