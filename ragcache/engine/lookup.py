"""Drafts of what a sequence will say next, looked up in what it has read and said.

Answers over retrieved passages quote them, and repeat themselves: what followed the last tokens
before often follows them again (prompt lookup decoding: Saxena, 2023; as speculative decoding:
Leviathan et al., ICML 2023). A draft costs no model; checking it costs a few more rows of a step
which had to read all weights anyway.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHORTEST, LONGEST = 2, 4  # tokens that must have come before, and with which more is not looked for
FIRST, LEAST = 3, 2  # tokens of the first draft, and of any that has room
NEWEST = 0.25  # weight of the last draft in the share of tokens that were right
RETRY = 8  # of drafts that do not seem worth it, one is tried


class PromptLookup:
    """Drafts for one sequence: longer while they are right, seldom while they are mostly wrong."""

    __slots__ = ("_buffer", "_count", "_reach", "_right", "_skipped")

    def __init__(self) -> None:
        self._buffer: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._count = 0  # of tokens in it
        self._reach = FIRST
        self._right = 0.5  # share of drafted tokens, lately
        self._skipped = 0  # drafts in a row

    def draft(self, tokens: list[int], limit: int, least: float = 0.0) -> list[int]:
        """At most `limit` tokens that may come behind `tokens`, which only ever grow.

        Mostly none where a smaller share than `least` has been right lately.
        """
        room = min(limit, self._reach)
        if room <= 0:
            return []
        known = self._known(tokens)
        start = _behind_last_match(known)
        if start is not None and self._right < least and self._skipped < RETRY - 1:
            self._skipped += 1
            return []
        # What would come behind the end begins anew, as a loop does.
        return [] if start is None else np.resize(known[start : start + room], room).tolist()

    def judge(self, drafted: int, right: int) -> None:
        """So many tokens of the last draft were right."""
        more = max(self._reach, 2 * drafted)
        self._reach = more if right == drafted else max(right + 1, LEAST)
        self._right += NEWEST * (right / drafted - self._right)
        self._skipped = 0

    def _known(self, tokens: list[int]) -> NDArray[np.int32]:
        count = len(tokens)
        if count > len(self._buffer):
            longer = np.empty(count + count // 4 + 64, dtype=np.int32)
            longer[: self._count] = self._buffer[: self._count]
            self._buffer = longer
        self._buffer[self._count : count] = tokens[self._count :]
        self._count = count
        return self._buffer[:count]


def _behind_last_match(known: NDArray[np.int32]) -> int | None:
    """The place behind the last of those where most of the last tokens came before."""
    if len(known) <= SHORTEST:
        return None
    ends = np.flatnonzero((known[:-2] == known[-2]) & (known[1:-1] == known[-1])) + 1
    if not len(ends):
        return None
    for back in range(SHORTEST, LONGEST):
        longer = ends[ends >= back]
        longer = longer[known[longer - back] == known[-1 - back]]
        if not len(longer):
            break
        ends = longer
    return int(ends[-1]) + 1
