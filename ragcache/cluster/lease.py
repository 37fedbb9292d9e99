"""Leases: a replica lives as long as it renews what it says about itself.

Only the server counts their time, and readers ask how much of it is left: no two clocks are
compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from ragcache.cluster.keys import LEASE, REMAINS, Keys
from ragcache.cluster.replica import Replica
from ragcache.cluster.server import Client, send
from ragcache.config import BaseUrl

FIELDS = tuple(each.name for each in fields(Replica) if each.name != "id")


_Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Lease(BaseModel):
    """Another process has written it, maybe of another version, maybe not one of ours."""

    epoch: str
    url: BaseUrl
    models: tuple[str, ...]
    fingerprint: str
    block_size: Annotated[_Count, Field(gt=0)]
    running: _Count
    waiting: _Count
    draining: bool


class Found(NamedTuple):
    """What there was when a lease was renewed."""

    complete: bool  # the stream and the snapshot
    epoch_changed: bool  # the lease was another's


async def renew(client: Client, keys: Keys, replica: Replica, seconds: int = LEASE) -> Found:
    """Let a replica live for `seconds`.

    A server without memory left refuses to write, but not to lengthen a life: each command counts
    by itself.
    """
    pipe = client.pipeline(transaction=False)
    lease, life = keys.lease(replica.id), (replica.id, replica.epoch)
    values = _write(replica)
    pipe.hget(lease, "epoch")
    pipe.hset(lease, mapping=values)
    pipe.expire(lease, seconds)
    pipe.sadd(keys.replicas, replica.id)
    for key in (keys.replicas, keys.events(*life), keys.snapshot(*life)):
        pipe.expire(key, REMAINS)
    epoch, *_, events, snapshot = await send(pipe)
    return Found(bool(events and snapshot), epoch not in (None, values["epoch"].encode()))


async def forget_dead(client: Client, keys: Keys) -> None:
    """Forget the ids that have no lease.

    One that comes back at this moment may be forgotten, too: its next renewal tells it again,
    before the lease that others know has run out.
    """
    ids = await _ids(client, keys)
    if not ids:
        return
    pipe = client.pipeline(transaction=False)
    for replica_id in ids:
        pipe.exists(keys.lease(replica_id))
    dead = [each for each, lives in zip(ids, await send(pipe), strict=True) if not lives]
    if dead:
        await client.srem(keys.replicas, *dead)


async def read(client: Client, keys: Keys) -> dict[str, tuple[dict[bytes, bytes], float]]:
    """By id the fields of every live lease, for `parse`, and the seconds that are left of it."""
    ids = await _ids(client, keys)
    if not ids:
        return {}
    pipe = client.pipeline(transaction=False)
    for replica_id in ids:
        pipe.hgetall(keys.lease(replica_id))
        pipe.pttl(keys.lease(replica_id))
    replies = await send(pipe)
    leases = zip(ids, replies[::2], replies[1::2], strict=True)
    return {each: (lease, left / 1000) for each, lease, left in leases if lease and left > 0}


def parse(replica_id: str, lease: Mapping[bytes, bytes]) -> Replica:
    """From what `renew` has written; raises ValueError for anything else."""
    try:
        values = {name: from_json(lease[name.encode()]) for name in FIELDS}
        return Replica(replica_id, **dict(_Lease.model_validate(values)))
    except KeyError as error:
        raise ValueError(f"its lease has no {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{first['loc'][0]} of its lease: {first['msg']}") from error


async def _ids(client: Client, keys: Keys) -> list[str]:
    """All ids; what is no text in UTF-8 becomes one that has no lease."""
    return sorted({each.decode(errors="ignore") for each in await client.smembers(keys.replicas)})


def _write(replica: Replica) -> dict[str, str]:
    return {name: json.dumps(getattr(replica, name)) for name in FIELDS}
