from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.errors import InvalidRequest
from ragcache.prompt.stops import StopStrings

texts = st.text("ab<>", max_size=30)
stop_lists = st.lists(st.text("ab<>", min_size=1, max_size=5), max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher, out = StopStrings(stops), ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        out += text
        if matched is not None:
            assert matcher.finish() == ""
            return out, matched
    return out + matcher.finish(), None


def oracle(stops: list[str], text: str) -> tuple[str, str | None]:
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    return (text[: min(found)[1]], min(found)[2]) if found else (text, None)


@given(stop_lists, st.lists(texts, max_size=8))
def test_any_cutting_gives_what_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == oracle(stops, "".join(pieces))


@given(stop_lists, texts)
def test_nothing_is_held_back_without_need(stops: list[str], text: str) -> None:
    out, matched = StopStrings(stops).push(text)
    if matched is None:
        held = text[len(out) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_text_before_the_stop_is_kept_and_the_stop_is_not() -> None:
    assert run(["\n\nUser:"], ["Hello", "\n", "\nUs", "er: x"]) == ("Hello", "\n\nUser:")


def test_a_broken_off_stop_is_text() -> None:
    assert run(["</answer>"], ["2 </", "ans", "wers"]) == ("2 </answers", None)


def test_of_two_that_end_together_the_longer_one_counts() -> None:
    assert run(["b", "ab"], ["xa", "b"]) == ("x", "ab")


def test_without_stops_text_passes_through() -> None:
    assert StopStrings(()).push("abc") == ("abc", None)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty") as error:
        StopStrings(["a", ""])
    assert error.value.param == "stop"
