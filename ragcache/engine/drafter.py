"""Which decodes of a step try some tokens ahead."""

from __future__ import annotations

from ragcache.engine.request import Chunk, total
from ragcache.prefix.cache import PrefixCache

DRAFT_ROWS = 32  # of decodes and drafts in a step; more would cost as much as they save

# What a row more costs beside one decode, as a share of that: some 4% on two cores with bfloat16
# products, since it waits for the weights. Beside eight of them it is 30% of what each costs.
ROW_COST = 0.04


class Drafter:
    """Adds drafts of at most `max_draft` tokens to decodes, and room for their KV."""

    def __init__(self, cache: PrefixCache, max_draft: int) -> None:
        self._cache = cache
        self._max_draft = max_draft
        self._running = 0

    def extend(self, decodes: list[Chunk], room: int, running: int) -> list[Chunk]:
        """The chunks of decodes, each with an equal share of `room` for its draft.

        A block is left free for each of the `running` sequences.
        """
        self._running = running
        rows = min(room, DRAFT_ROWS - total(decodes))
        limit = min(self._max_draft, rows // max(len(decodes), 1))
        least = ROW_COST * len(decodes)
        return [self._extend(chunk, limit, least) for chunk in decodes] if limit > 0 else decodes

    def _extend(self, chunk: Chunk, limit: int, least: float) -> Chunk:
        """The chunk with a draft behind it, where there is one and room for its KV.

        A grammar would have to be undone behind tokens that turn out to be wrong, and a prompt's
        last row is where all its choices begin.
        """
        sequence = chunk.sequence
        if sequence.constraint is not None or not sequence.num_output or not chunk.samples:
            return chunk
        limit = min(limit, sequence.request.max_tokens - sequence.num_output - 1)
        draft = sequence.lookup.draft(sequence.tokens, limit, least)
        if draft and self._has_room(chunk, len(draft)):
            return Chunk(sequence, chunk.start, chunk.count + len(draft), draft)
        return chunk

    def _has_room(self, chunk: Chunk, count: int) -> bool:
        """Whether there is KV for `count` tokens more; what others will need is left to them."""
        sequence, size = chunk.sequence, self._cache.block_size
        wanted = len(sequence.tokens) + count
        more = -(-wanted // size) - len(self._cache.table(sequence.row))
        if more > 0 and more + self._running > self._cache.available:
            return False
        return self._cache.grow(sequence.row, wanted)
