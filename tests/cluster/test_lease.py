"""What a lease says is checked: others write it."""

from __future__ import annotations

import json

import pytest
from redis_pool import eventually, known, names

from ragcache.cluster.lease import parse
from ragcache.cluster.replica import Replica

A = Replica("a", "1", "http://a:8000/base", ("m", "n"), "f", 16, 3, 0, draining=False)
LEASE = {
    "epoch": "1",
    "url": "http://a:8000/base",
    "models": ["m", "n"],
    "fingerprint": "f",
    "block_size": 16,
    "running": 3,
    "waiting": 0,
    "draining": False,
}


def written(**values) -> dict[bytes, bytes]:
    return {name.encode(): json.dumps(each).encode() for name, each in (LEASE | values).items()}


def test_a_lease_is_a_replica():
    assert parse("a", written()) == A
    assert parse("a", written(of_a_later_version=1)) == A


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("url", None),
        ("url", "ftp://a"),
        ("url", "http://user:password@a"),
        ("running", "x"),
        ("waiting", -1),
        ("running", 1e400),
        ("running", 10**400),
        ("block_size", 0),
        ("block_size", None),
        ("models", "m"),
        ("models", [1]),
        ("draining", "who knows"),
        ("epoch", 7),
        ("fingerprint", [[[]]]),
    ],
)
def test_anything_else_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        parse("a", written(**{name: value}))


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[" * 100_000, b'"\\ud800"'])
def test_what_is_not_json_is_refused(raw):
    with pytest.raises(ValueError):  # noqa: PT011
        parse("a", written() | {b"epoch": raw})
    with pytest.raises(ValueError, match="epoch"):
        parse("a", {name: raw for name, raw in written().items() if name != b"epoch"})


async def test_rubbish_in_redis_costs_one_line_and_nothing_else(pool, redis_server, caplog):
    admin, keys = redis_server.admin, pool.keys
    replica, directory = pool.replica(), pool.directory()
    admin.sadd(keys.replicas, b"\xff\xfe", "b", "c")
    admin.hset(keys.lease("b"), mapping=written(url=None))
    admin.hset(keys.lease("c"), mapping=written())
    admin.hset(keys.snapshot("c", "1"), mapping={"position": -1})
    for name in "bc":
        admin.expire(keys.lease(name), 100)
    replica.serve([1] * 8)
    await eventually(lambda: directory.match("a:8000", names([1] * 8)) == 4)
    await eventually(lambda: len(directory.replicas()) == 2)
    await eventually(lambda: len(caplog.records) == 2)
    replica.serve([2] * 8)
    await eventually(lambda: known(directory, replica) == replica.outbox.blocks())
    assert directory.connected
    assert {record.args[0] for record in caplog.records} == {"b", "c"}
    assert "\n" not in "".join(record.message for record in caplog.records)
