"""What changed in system text and tools since a session's last turn."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from langchain_ragcache.prompt_changes import PromptChanges

SYSTEM = "You answer from the passages given."


def tool(name, description="Look up.", **properties):
    parameters = {"type": "object", "properties": properties or {"q": {"type": "string"}}}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


A, B, C = tool("a"), tool("b"), tool("c")


@pytest.fixture
def changes():
    return PromptChanges()


def kinds(found):
    return [change.kind for change in found]


def told(changes, *turns):
    """What is told of the last of these turns (system, tools) of one session."""
    *_, last = [changes.observe("t", system, tools) for system, tools in turns]
    return list(map(str, last))


def test_the_first_turn_and_an_equal_one_have_nothing_to_tell(changes):
    assert told(changes, (SYSTEM, [A, B])) == []
    assert told(changes, (SYSTEM, [tool("a"), tool("b")])) == []


def test_a_changed_system_text_is_told_with_its_first_different_character(changes):
    [text] = told(changes, ("Now 10:15:07. Help.", []), ("Now 10:15:09. Help.", []))
    assert text == (
        "system: from character 11 on, 'Now 10:15:07. Help.' became 'Now 10:15:09. Help.'"
    )


def test_the_excerpts_of_long_texts_are_cut(changes):
    before, after = "a" * 50 + "b" + "c" * 24, "a" * 50 + "d" + "c" * 23
    [text] = told(changes, (before, []), (after, []))
    b, d = (repr("a" * 12 + letter + "c" * 23) for letter in "bd")
    assert text == f"system: from character 50 on, …{b}… became …{d}"


@pytest.mark.parametrize(
    ("before", "after", "at"),
    [("one", "one more", 3), ("one more", "one", 3), ("", "one", 0), ("a\r\n", "a\n", 1)],
)
def test_texts_may_end_where_they_differ(changes, before, after, at):
    [text] = told(changes, (before, []), (after, []))
    assert text == f"system: from character {at} on, {before!r} became {after!r}"


def test_added_removed_and_reordered_tools_are_named(changes):
    assert told(changes, ("", [A]), ("", [A, B, C])) == ["tools added: b, c"]
    assert told(changes, ("", [C])) == ["tools removed: a, b"]
    changes = PromptChanges()
    assert told(changes, ("", [A, B, C]), ("", [C, A, B])) == [
        "tools reordered: a, b, c became c, a, b"
    ]


def test_a_tool_in_the_middle_reorders_nothing(changes):
    assert told(changes, ("", [A, C]), ("", [A, B, C])) == ["tools added: b"]
    assert told(changes, ("", [B, C])) == ["tools removed: a"]


def test_changed_fields_of_a_tool_are_told_with_its_name(changes):
    [text] = told(changes, ("", [A, B]), ("", [A, tool("b", "Look it up.")]))
    assert (
        text == "tool b: description: from character 6 on, '\"Look up.\"' became '\"Look it up.\"'"
    )
    [text] = told(changes, ("", [A, tool("b", "Look it up.", n={"type": "number"})]))
    assert text.startswith("tool b: parameters: from character 35 on, ")
    assert not text.endswith("order)")


def test_keys_of_a_schema_in_another_order_are_told_as_that(changes):
    one, other = tool("a", x={}, y={}), tool("a", y={}, x={})
    [text] = told(changes, ("", [one]), ("", [other]))
    assert text.startswith("tool a: parameters: ")
    assert text.endswith(" (the same keys in another order)")


def test_markers_and_what_the_prompt_does_not_show_are_no_change(changes):
    marked = {**A, "cache_control": {"type": "ephemeral"}}
    strict = {**A, "function": {**A["function"], "strict": True}}
    assert told(changes, ("", [A]), ("", [marked])) == []
    assert told(changes, ("", [strict])) == []


def test_several_changes_are_told_system_first(changes):
    found = told(changes, ("one", [A, B]), ("two", [tool("a", "New."), C]))
    assert [text.partition(" ")[0] for text in found] == ["system:", "tools", "tools", "tool"]


def test_each_kind_is_told_once_a_session(changes):
    clocks = [changes.observe("t", f"Now {i}", [A]) for i in range(3)]
    assert list(map(kinds, clocks)) == [[], ["system"], []]
    assert kinds(changes.observe("t", "Now 4", [A, B])) == ["tools added"]
    changes.observe("u", "Now 1", [A])
    assert kinds(changes.observe("u", "Now 2", [A])) == ["system"]


def test_the_last_turn_is_what_counts(changes):
    changes.observe("t", "one", [A])
    changes.observe("t", "one", [A, B])
    assert changes.observe("t", "one", [A, B]) == []


def test_sessions_do_not_mix(changes):
    changes.observe("t", "one", [A])
    assert changes.observe("u", "two", [B]) == []


def test_the_session_used_least_recently_is_forgotten():
    changes = PromptChanges(max_sessions=2)
    for session in ("t", "u", "t", "v"):
        changes.observe(session, "one", [])
    assert kinds(changes.observe("t", "two", [])) == ["system"]
    assert changes.observe("u", "two", []) == []


def test_the_tools_of_a_turn_may_be_changed_in_place_afterwards(changes):
    mine = tool("a")
    changes.observe("t", "", [mine])
    mine["function"]["description"] = "Something else."
    assert kinds(changes.observe("t", "", [mine])) == ["tool a: description"]


def test_threads_may_share_it(changes):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: changes.observe("t", f"Now {i}", [A]), range(2000)))
    finally:
        sys.setswitchinterval(interval)
    assert sum(map(len, found)) == 1
