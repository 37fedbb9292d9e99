"""Which rows of a step's logits belong to whom, and what was sampled from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from ragcache.engine.request import Chunk, Sequence
from ragcache.engine.sampler import Sampled


@dataclass(frozen=True, slots=True)
class Part:
    """What a step brought for one chunk: rows `[start, stop)` of its logits.

    Choices in `sampled` get a token from the last of the rows, but for those behind a draft; those
    in `given` begin with tokens that need no logits, or end with none. `chosen` are the tokens that
    each of the former goes on with.
    """

    chunk: Chunk
    start: int
    stop: int
    sampled: list[Sequence] = field(default_factory=list)
    given: list[tuple[Sequence, list[int]]] = field(default_factory=list)
    chosen: list[list[Sampled]] = field(default_factory=list)

    def rows(self) -> list[tuple[int, Sequence]]:
        """Which row gives whom a token: each choice, then what it is if its draft is right."""
        draft = self.chunk.draft
        row = self.stop - 1 - len(draft)
        supposed = [self.chunk.sequence.behind(draft[:i]) for i in range(1, len(draft) + 1)]
        return [(row, each) for each in self.sampled] + list(enumerate(supposed, row + 1))

    def choose(self, tokens: Iterator[Sampled]) -> None:
        """Take what was sampled from the rows, as far as it is what the choices go on with."""
        draft, ends = self.chunk.draft, self.chunk.sequence.request.end_token_ids
        for _ in self.sampled:
            run = list(islice(tokens, 1 + len(draft)))
            self.chosen.append(_foreseen(run, draft, ends))

    @property
    def right(self) -> int:
        """How many tokens of the draft are what the choice has said, and has gone on behind."""
        return len(self.chosen[0]) - 1 if self.chunk.draft else 0

    @property
    def meant(self) -> slice:
        """The rows of logits that are not behind anything wrong."""
        return slice(self.start, self.stop - len(self.chunk.draft) + self.right)


def parts_of(chunks: list[Chunk]) -> list[Part]:
    """Those of a step, in order, that have rows."""
    parts: list[Part] = []
    stop = 0
    for chunk in chunks:
        start, stop = stop, stop + chunk.num_logits
        if start < stop:
            parts.append(Part(chunk, start, stop))
    return parts


def _foreseen(
    sampled: list[Sampled], draft: list[int], end_token_ids: frozenset[int]
) -> list[Sampled]:
    """What was sampled up to the first token that is not the draft's, or is the choice's last."""
    for i, (one, token) in enumerate(zip(sampled, draft, strict=False), 1):
        if one.token_id != token or token in end_token_ids:
            return sampled[:i]
    return sampled
