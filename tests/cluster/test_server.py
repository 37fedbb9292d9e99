"""URLs, and the kinds of servers behind them."""

from __future__ import annotations

import socket
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from redis_pool import RedisServer, eventually, known, names, valkey_binary

from ragcache.cluster.server import Server
from ragcache.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis://host", "redis://host"),
        ("redis://user:secret@host:7000/3", "redis://host:7000/3"),
        ("rediss://:secret@host/0?ssl_ca_certs=/ca.pem", "rediss://host/0"),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock"),
        ("unix://user:secret@/run/redis.sock", "unix:///run/redis.sock"),
        ("redis+sentinel://u:secret@a:1,b/main/2", "redis+sentinel://a:1,b/main/2"),
        ("rediss+cluster://[::1]:7000,b:7001", "rediss+cluster://[::1]:7000,b:7001"),
    ],
)
def test_a_url_is_shown_without_its_account(url, name):
    assert str(Server(url)) == name


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:6379", "must begin with one of unix, redis, redis.cluster"),
        ("http://host", "must begin"),
        ("redis+tree://host", "must begin"),
        ("unix+cluster:///s", "must begin"),
        ("redis://", "names no server"),
        ("unix://", "names no server"),
        ("redis+cluster://a,:7000", "names no server"),
        ("redis://host:port", "Port could not be cast"),
        ("redis+cluster://a:1,b:99999", "Port out of range"),
        ("redis+sentinel://host", "the service is missing"),
    ],
)
def test_another_url_is_refused_with_the_reason(url, message):
    with pytest.raises(ConfigError, match=f"redis_url: .*{message}"):
        Server(url)


async def test_accounts_databases_and_tls_reach_every_kind_of_client():
    async with Server("rediss+sentinel://u:p%40@a/main/2?ssl_ca_certs=/ca").client() as client:
        options = client.connection_pool.connection_kwargs
        assert (options["username"], options["password"], options["db"]) == ("u", "p@", 2)
        assert options["ssl_ca_certs"] == "/ca"
        assert "SSL" in client.connection_pool.connection_class.__name__
        (sentinel,) = client.connection_pool.sentinel_manager.sentinels
        assert "SSL" in sentinel.connection_pool.connection_class.__name__
        options = sentinel.connection_pool.connection_kwargs
        assert (options["ssl_ca_certs"], options["password"]) == ("/ca", None)
    async with Server("rediss+cluster://u:p%40@a").client() as client:
        options = client.connection_kwargs
        assert (options["username"], options["password"]) == ("u", "p@")
        assert "SSL" in options["connection_class"].__name__


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def running(*options: object):
    server = RedisServer(*map(str, options))
    try:
        server.start()
        yield server
    finally:
        server.close()


async def tell_and_follow(pool) -> None:
    replica, directory = pool.replica(), pool.directory()
    replica.serve([1] * 8)
    await eventually(lambda: directory.match("a:8000", names([1] * 8)) == 4)
    replica.cache.reset()
    await eventually(lambda: known(directory, replica) == {})
    await pool.close()


async def test_a_cluster_serves_a_pool_from_one_of_its_slots(make_pool):
    port, bus = free_ports(2)
    with running("--port", port, "--cluster-enabled", "yes", "--cluster-port", bus) as server:
        server.admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await tell_and_follow(make_pool(f"redis+cluster://127.0.0.1:{port}"))


@contextmanager
def sentinel(config: Path):
    """A sentinel with this configuration, which it rewrites."""
    command = [valkey_binary(), config, "--sentinel"]
    process = subprocess.Popen(command, cwd=config.parent, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("account", ["", "sentinel_password=s%2Fs"])
async def test_sentinels_lead_to_the_primary(make_pool, tmp_path, account):
    port, sentinel_port = free_ports(2)
    config = tmp_path / "sentinel.conf"
    secret = "requirepass s/s\n" if account else ""
    config.write_text(f"port {sentinel_port}\nsentinel monitor main 127.0.0.1 {port} 1\n{secret}")
    with running("--port", port), sentinel(config):
        nodes = f"127.0.0.1:1,127.0.0.1:{sentinel_port}"
        await tell_and_follow(make_pool(f"redis+sentinel://{nodes}/main?{account}"))


async def test_sentinels_that_want_a_password_are_told_of(make_pool, tmp_path, caplog):
    port, sentinel_port = free_ports(2)
    config = tmp_path / "sentinel.conf"
    config.write_text(f"port {sentinel_port}\nrequirepass secret\n")
    with running("--port", port), sentinel(config):
        pool = make_pool(f"redis+sentinel://127.0.0.1:{sentinel_port}/main")
        pool.directory()
        await eventually(lambda: caplog.records)
        await pool.close()
    assert "main" in caplog.text


async def test_a_cluster_that_is_away_is_waited_for(make_pool, caplog):
    port, bus = free_ports(2)
    pool = make_pool(f"redis+cluster://127.0.0.1:{port}")
    replica = pool.replica()
    await eventually(lambda: caplog.records)
    with running("--port", port, "--cluster-enabled", "yes", "--cluster-port", bus) as server:
        server.admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await eventually(lambda: replica.publisher.stats().connected)
        await pool.close()
    assert len(caplog.records) == 1
    assert "Traceback" not in caplog.text
