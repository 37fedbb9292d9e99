"""From a URL to clients of Redis or Valkey: of a server, a cluster, or what sentinels watch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from ragcache.errors import ConfigError

FAILURES = (RedisError, RedisClusterException, OSError)  # what the methods of a client raise

TIMEOUT = 0.5  # seconds, of a command
PATIENCE = 10.0  # seconds, of a command with a whole snapshot
KINDS = ("", "+cluster", "+sentinel")
SCHEMES = ["unix", *(scheme + kind for scheme in ("redis", "rediss") for kind in KINDS)]


class Client(Protocol):
    """What is used of redis-py, whose own types leave open what a client was made for.

    Every command is in Redis 6.2.
    """

    def pipeline(self, *, transaction: bool) -> Any:
        """Commands that are sent together, see `send`."""

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        """HGETALL."""

    async def smembers(self, key: str) -> set[bytes]:
        """SMEMBERS."""

    async def srem(self, key: str, *members: str) -> int:
        """SREM."""

    async def unlink(self, *keys: str) -> int:
        """UNLINK."""

    async def xread(
        self, streams: dict[str, str], *, count: int
    ) -> list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
        """XREAD without BLOCK."""


class Server:
    """What a URL names; as a string, without its password.

    redis://[[user]:password@]host[:port][/db], with rediss:// over TLS, or unix://path;
    redis+cluster://host:port,host:port for a cluster, by some of its nodes;
    redis+sentinel://host:port,host:port/service[/db] for the primary that sentinels know. User and
    password are the servers'; the sentinels' are `sentinel_username` and `sentinel_password` in the
    query. Raises ConfigError for anything else.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._url = url
        self._scheme, _, self._kind = parts.scheme.partition("+")
        self._account, _, hosts = parts.netloc.rpartition("@")
        self._name = f"{parts.scheme}://{hosts}{parts.path}"
        self._query = parts.query
        path = parts.path.strip("/")
        self._service, _, self._database = path.partition("/")
        try:
            if parts.scheme not in SCHEMES:
                raise ValueError(f"it must begin with one of {', '.join(SCHEMES)}")
            port = 26379 if self._kind == "sentinel" else 6379
            self._nodes = [_node(each, port) for each in hosts.split(",")]
            if not (path if parts.scheme == "unix" else all(host for host, _ in self._nodes)):
                raise ValueError("it names no server")
            if self._kind == "sentinel" and not self._service:
                raise ValueError("the service is missing behind the sentinels, as /service")
        except ValueError as error:
            raise ConfigError(f"redis_url: {error}") from error

    def __str__(self) -> str:
        return self._name

    @asynccontextmanager
    async def client(self, patience: float = TIMEOUT) -> AsyncIterator[Client]:
        """A new client, which waits `patience` seconds for each reply.

        It connects with its first command, and tries none twice.
        """
        async with AsyncExitStack() as stack:
            if not self._kind:
                client: Redis | RedisCluster = Redis.from_url(self._url, **_options(patience))
            elif self._kind == "cluster":
                nodes = [ClusterNode(host, port) for host, port in self._nodes]
                client = RedisCluster(startup_nodes=nodes, **_options(patience), **self._access(""))
            else:
                access = self._access(self._database)
                sentinel = Sentinel(  # type: ignore[no-untyped-call]
                    self._nodes, sentinel_kwargs={**_options(TIMEOUT), **_sentinels_access(access)}
                )
                for each in sentinel.sentinels:
                    stack.push_async_callback(each.aclose)
                client = sentinel.master_for(self._service, **_options(patience), **access)
            stack.push_async_callback(client.aclose)
            yield cast(Client, client)

    def _access(self, database: str) -> dict[str, Any]:
        """Account, database and TLS, which `Redis.from_url` reads by itself."""
        access: dict[str, Any] = dict(
            parse_url(f"{self._scheme}://{self._account}@/{database}?{self._query}")
        )
        tls = access.pop("connection_class", None) is not None
        return {**access, "ssl": tls}


def _sentinels_access(access: dict[str, Any]) -> dict[str, Any]:
    """Takes the sentinels' account out of `access`; TLS is as the servers have it."""
    names = {f"sentinel_{each}": each for each in ("username", "password")}
    account = {names[each]: access.pop(each) for each in names.keys() & access.keys()}
    return account | {name: access[name] for name in access if name.startswith("ssl")}


async def send(pipeline: Any) -> list[Any]:
    """The replies to its commands, all of which are run; raises the first error among them.

    redis-py would put the command before the error, with names of blocks, which are not text.
    """
    replies: list[Any] = await pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def _options(timeout: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout,
        "socket_connect_timeout": TIMEOUT,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }


def _node(address: str, port: int) -> tuple[str, int]:
    """Host and port; raises ValueError for a wrong port."""
    parts = urlsplit(f"//{address}")
    return parts.hostname or "", parts.port or port
