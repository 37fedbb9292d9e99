"""Whole gateways that are replicas of a pool; only the weights are scripted."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from redis_pool import RedisServer, eventually
from scripted import BLOCK

from ragcache.cluster.directory import Directory
from ragcache.config import ServeSettings
from ragcache.gateway.membership import Membership
from ragcache.gateway.tenants import Tenants
from ragcache.prefix.names import block_names, namespace_name, owner_name

PROMPT = list(range(100, 100 + 5 * BLOCK))
KEY = "sk-of-mine"
TENANT = Tenants([KEY]).tenant({"x-api-key": KEY})
WITHOUT_REDIS = """
import sys
import ragcache.cli, ragcache.gateway.app
assert "redis" not in sys.modules
import ragcache.gateway.membership
assert "redis" in sys.modules
"""


def names(tokens=PROMPT, tenant: str = TENANT, salt: str | None = None) -> list[bytes]:
    return block_names(namespace_name(owner_name("scripted", tenant), salt), tokens, BLOCK)


def complete(gateway, tokens=PROMPT, **options):
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 4, **options}
    return gateway.http.post("/v1/completions", json=body).raise_for_status().json()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """One server for this module, since it takes its time to make a gateway."""
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def make_replica(make_gateway, redis_server):
    """A context manager: a gateway with one API key that others reach at http://NAME:8000."""

    @contextmanager
    def make(name: str):
        settings = ServeSettings(
            redis_url=redis_server.url, advertise_url=f"http://{name}:8000", cluster_name="test"
        )
        with make_gateway(num_blocks=40, settings=settings, api_keys=[KEY]) as gateway:
            gateway.http.headers["x-api-key"] = KEY
            yield gateway

    return make


@pytest.fixture(scope="module")
def shared_replica(make_replica):
    with make_replica("a") as gateway:
        yield gateway


@pytest.fixture
def replica(shared_replica):
    """With an empty cache."""
    shared_replica.http.post("/cache/reset").raise_for_status()
    return shared_replica


@pytest.fixture
async def directory(pool) -> Directory:
    return pool.directory()


async def test_a_prompt_that_was_served_is_known_to_be_there(replica, directory):
    complete(replica)
    await eventually(lambda: directory.match("a:8000", names()) == 5)
    (known,) = directory.replicas()
    assert (known.url, known.models) == ("http://a:8000", ("tiny", "alias"))
    assert (known.fingerprint, known.block_size) == ("scripted", BLOCK)
    assert not known.draining


async def test_a_reset_is_told(replica, directory):
    complete(replica)
    await eventually(lambda: directory.match("a:8000", names()) == 5)
    replica.http.post("/cache/reset").raise_for_status()
    await eventually(lambda: directory.match("a:8000", names()) == 0)


async def test_what_is_evicted_is_told(replica, directory):
    complete(replica)
    await eventually(lambda: directory.match("a:8000", names()) == 5)
    complete(replica, list(range(1000, 1000 + 38 * BLOCK)))
    await eventually(lambda: directory.match("a:8000", names()) < 5)


async def test_salts_and_tenants_are_part_of_every_name(replica, directory):
    complete(replica, cache_salt="pepper")
    await eventually(lambda: directory.match("a:8000", names(salt="pepper")) == 5)
    assert directory.match("a:8000", names()) == 0
    assert directory.match("a:8000", names(tenant="", salt="pepper")) == 0


async def test_no_text_and_no_key_is_in_redis(replica, redis_server, directory):
    for turn in range(20):
        text = f"{turn} lighthouse umbrella " * 20
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        extra = {"max_tokens": 4, "cache_salt": "pepper", "user": "zanzibar"}
        replica.http.post("/v1/chat/completions", json=body | extra).raise_for_status()
    complete(replica)
    await eventually(lambda: directory.match("a:8000", names()) == 5)
    dump = b"".join(everything(redis_server.admin))
    assert b"tiny" in dump  # the model's name, as a control
    assert names()[0][:16] in dump
    tokens = b"".join(token.to_bytes(4, "little") for token in PROMPT[:3])
    for forbidden in (b"lighthouse", b"umbrella", b"pepper", b"zanzibar", KEY.encode(), tokens):
        assert forbidden not in dump


async def test_requests_go_on_whatever_redis_does(replica, redis_server, directory, caplog):
    connected = "ragcache_cluster_connected"
    await eventually(lambda: replica.metrics()[connected] == 1)
    expected = complete(replica)["choices"]
    caplog.set_level(logging.INFO, "ragcache.cluster.link")
    await eventually(lambda: directory.match("a:8000", names()) == 5)
    caplog.clear()
    redis_server.freeze()
    for _ in range(10):
        answer = complete(replica)
        assert answer["choices"] == expected
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * BLOCK
    await eventually(lambda: replica.metrics()[connected] == 0 and not directory.connected)
    assert replica.metrics()["ragcache_cluster_lag_seconds"] > 0
    assert replica.http.get("/ready").status_code == 200
    assert len(caplog.records) == 2
    redis_server.kill()
    assert complete(replica)["choices"] == expected
    complete(replica, PROMPT[1:])
    redis_server.start()
    await eventually(lambda: directory.match("a:8000", names(PROMPT[1:])) == 4)
    await eventually(lambda: replica.metrics()["ragcache_cluster_lag_seconds"] == 0)
    levels = [record.levelname for record in caplog.records]
    assert sorted(levels) == ["INFO", "INFO", "WARNING", "WARNING"]  # replica and directory


async def test_an_engine_that_has_failed_is_not_offered_and_leaves_with_its_gateway(
    make_replica, directory
):
    def replicas():
        return {each.id: each for each in directory.replicas()}

    with make_replica("b") as gateway:
        await eventually(lambda: "b:8000" in replicas())
        gateway.serving._client.engine.fail("a test wants it")
        await eventually(lambda: replicas()["b:8000"].draining)
    await eventually(lambda: "b:8000" not in replicas())


def everything(admin):
    """All keys and all values."""
    read = {
        b"hash": lambda key: [part for pair in admin.hgetall(key).items() for part in pair],
        b"set": admin.smembers,
        b"stream": lambda key: [
            part for _, fields in admin.xrange(key) for pair in fields.items() for part in pair
        ],
    }
    for key in admin.keys("*"):
        yield key
        yield from read[admin.type(key)](key)


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "::1", "port": 9}, "http://[::1]:9"),
        ({"host": "0.0.0.0"}, f"http://{socket.gethostname()}:8000"),
        ({"port": 0, "advertise_url": "https://replica.example/a/"}, "https://replica.example/a"),
    ],
)
def test_others_reach_a_replica_where_it_listens_or_as_it_says(options, url):
    settings = ServeSettings(redis_url="redis://host", **options)
    assert Membership("redis://host", settings).url == url


@pytest.mark.parametrize(
    "options",
    [
        {"port": 0},
        {"advertise_url": "replica:8000"},
        {"advertise_url": "http://user:password@replica"},
        {"cluster_name": "a}b"},
    ],
)
def test_what_others_could_not_use_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options)) + "|advertise_url"):
        ServeSettings(redis_url="redis://host", **options)


def test_only_who_needs_redis_imports_its_client():
    subprocess.run([sys.executable, "-c", WITHOUT_REDIS], check=True)
