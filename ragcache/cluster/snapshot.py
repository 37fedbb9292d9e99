"""Snapshots: all blocks of a replica, for those who have not followed its stream from the start.

One has every batch up to its position, and maybe some of the next ones already: which of them
does not matter, since a batch says where blocks are, not how that differs from before.
"""

from __future__ import annotations

import asyncio

from ragcache.cluster.blocks import Blocks, Changes
from ragcache.cluster.keys import REMAINS, Keys
from ragcache.cluster.replica import Replica
from ragcache.cluster.server import Client, send


async def write(
    client: Client, keys: Keys, replica: Replica, position: int, blocks: dict[bytes, bool]
) -> None:
    """Replace the snapshot; `blocks` are names, and whether they are on the host."""
    fields = (await asyncio.to_thread(Changes.of, blocks)).fields()
    key = keys.snapshot(replica.id, replica.epoch)
    pipe = client.pipeline(transaction=False)
    pipe.hset(key, mapping={"position": position, **fields})
    pipe.expire(key, REMAINS)
    await send(pipe)


async def read(client: Client, keys: Keys, replica: Replica) -> tuple[int, Blocks] | None:
    """Position and blocks, None where there is no snapshot; raises ValueError for a wrong one."""
    fields = await client.hgetall(keys.snapshot(replica.id, replica.epoch))
    if b"position" not in fields:
        return None
    position = int(fields[b"position"])
    if not 0 <= position < 1 << 63:
        raise ValueError(f"{position} is no position in a stream")
    blocks = Blocks()
    await asyncio.to_thread(blocks.apply, Changes.read(fields))
    return position, blocks
