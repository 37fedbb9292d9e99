"""A request before it runs, a `Plan`, and while it runs, a `Row`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcache.prefix.blocks import Block


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What admitting a prompt would take, as of one `generation` of the cache; holds nothing."""

    tokens: Sequence[int]
    namespace: bytes
    hits: Sequence[Block]
    hit_tokens: int
    blocks_needed: int  # out of the queue: new blocks, and hits that nobody holds yet
    generation: int


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
    num_tokens: int
    num_computed: int
    publishes: bool  # while true, every whole block below num_computed is published
