"""What a replica tells the others about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine behind its gateway, as of its last lease.

    `id` stays the same over restarts at one address, `epoch` is new with each. `fingerprint` is
    that of the model's KV: with it begin the names of all blocks.
    """

    id: str
    epoch: str
    url: str
    models: tuple[str, ...]
    fingerprint: str
    block_size: int
    running: int
    waiting: int
    draining: bool
