"""What changed between two turns in the part of a prompt that should stay: system and tools.

They are the first tokens of a prompt, so that a prefix cache finds nothing behind a change.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

RENDERED_FIELDS = ("description", "parameters")  # of a tool, beside its name


class PromptChangedWarning(UserWarning):
    """System text or tools are not those of the last turn: the cache ends where they differ."""


class PromptChange(NamedTuple):
    """One difference to the last turn; `kind` names the part: "system", "tools added" …"""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(slots=True)
class Turn:
    """The stable part of one prompt as text; `tools` maps names to fields, in their order."""

    system: str
    tools: Mapping[str, Mapping[str, str]]
    told: set[str] = field(default_factory=set)  # the kinds of change reported so far

    @classmethod
    def of(cls, system: str, tools: Sequence[Mapping[str, Any]]) -> Turn:
        """The turn that sends these tools, in OpenAI's form."""
        functions = [tool["function"] for tool in tools]
        return cls(system, {function["name"]: _rendered(function) for function in functions})


def _rendered(function: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(function.get(key), ensure_ascii=False) for key in RENDERED_FIELDS}


class PromptChanges:
    """The last turn of each session; of the sessions, those that were used last.

    May be used by several threads at once.
    """

    def __init__(self, max_sessions: int = 1024) -> None:
        self._max_sessions = max_sessions
        self._turns: dict[Hashable, Turn] = {}
        self._lock = Lock()

    def observe(
        self, session: Hashable, system: str, tools: Sequence[Mapping[str, Any]]
    ) -> list[PromptChange]:
        """Remember this turn; how it differs from the last one, each kind once a session.

        `tools` are as they are sent: in OpenAI's form and in that order.
        """
        turn = Turn.of(system, tools)
        with self._lock:
            last = self._turns.pop(session, turn)
            turn.told = last.told
            new = [change for change in differences(last, turn) if change.kind not in turn.told]
            turn.told.update(change.kind for change in new)
            self._turns[session] = turn
            if len(self._turns) > self._max_sessions:
                del self._turns[next(iter(self._turns))]
        return new


def differences(before: Turn, after: Turn) -> Iterator[PromptChange]:
    """Every difference, that of the system text first."""
    if before.system != after.system:
        yield PromptChange("system", _first_difference(before.system, after.system))
    yield from _tool_list_differences([*before.tools], [*after.tools])
    for name, fields in after.tools.items():
        for key, text in fields.items():
            last = before.tools.get(name, fields)[key]
            if text != last:
                yield PromptChange(f"tool {name}: {key}", _json_difference(last, text))


def _tool_list_differences(before: list[str], after: list[str]) -> Iterator[PromptChange]:
    if added := [name for name in after if name not in before]:
        yield PromptChange("tools added", ", ".join(added))
    if removed := [name for name in before if name not in after]:
        yield PromptChange("tools removed", ", ".join(removed))
    kept = [name for name in before if name in after]
    reordered = [name for name in after if name in before]
    if kept != reordered:
        yield PromptChange("tools reordered", f"{', '.join(kept)} became {', '.join(reordered)}")


def _json_difference(before: str, after: str) -> str:
    """The first difference of two JSON texts, and whether it is one of order only."""
    same = json.loads(before) == json.loads(after)
    return _first_difference(before, after) + (" (the same keys in another order)" if same else "")


def _first_difference(before: str, after: str) -> str:
    ends = min(len(before), len(after))
    at = next((i for i in range(ends) if before[i] != after[i]), ends)
    return f"from character {at} on, {_excerpt(before, at)} became {_excerpt(after, at)}"


def _excerpt(text: str, at: int) -> str:
    """The surroundings of a position, quoted so that blanks and control characters show."""
    start, end = max(0, at - 12), at + 24
    return f"{'…' if start else ''}{text[start:end]!r}{'…' if end < len(text) else ''}"
