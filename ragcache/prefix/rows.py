"""A request before it runs, a `Plan`, and while it runs, a `Row`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache.prefix.blocks import Block


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What admitting a prompt would take, as of one `generation` of the cache; holds nothing."""

    tokens: Sequence[int]
    namespace: bytes
    hits: Sequence[Block]  # on the device
    host_hits: Sequence[Block]  # behind them; to be swapped in
    hit_tokens: int  # of both
    host_tokens: int  # of the host hits
    blocks_needed: int  # out of the queue: new blocks, and hits that nobody holds yet
    generation: int
    limit: int | None  # of the hit tokens


@dataclass(slots=True, eq=False)
class Row:
    """One running request's block table and how far it is filled; only the cache changes it.

    0 ........ hit_tokens ........ num_computed ........ num_tokens ........ len(table) * block size
      KV came from    KV computed and      to be computed        reserved, empty
      the cache       committed
    """

    tokens: Sequence[int]
    namespace: bytes
    table: list[int]  # logical block -> physical id
    hit_tokens: int
    host_tokens: int  # the last of the hit tokens: their KV is swapped in before the next step
    num_tokens: int
    num_computed: int
    publish_limit: int  # every whole block below it and below num_computed is published

    @classmethod
    def start(cls, plan: Plan, table: list[int], publish_limit: int | None) -> Row:
        """Begin with a plan's hits computed; without a limit, everything is published."""
        return cls(
            plan.tokens,
            plan.namespace,
            table,
            hit_tokens=plan.hit_tokens,
            host_tokens=plan.host_tokens,
            num_tokens=len(plan.tokens),
            num_computed=plan.hit_tokens,
            publish_limit=sys.maxsize if publish_limit is None else publish_limit,
        )

    def published_blocks(self, num_computed: int, block_size: int) -> int:
        """Whole blocks that are published once `num_computed` tokens are."""
        return min(num_computed, self.publish_limit) // block_size
