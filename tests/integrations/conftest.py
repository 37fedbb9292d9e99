"""ChatRagcache in both of its modes, with the scripted gateway behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from langchain_ragcache import ChatRagcache, shutdown
from pytest_asyncio import is_async_test
from scripted import Gateway, embedded, gateway, make_gateway, shared_gateway, small_model

from ragcache.embedded import EmbeddedGateway

__all__ = ["embedded", "gateway", "make_gateway", "shared_gateway", "small_model"]

HERE = Path(__file__).parent
LIMIT = 4000  # tokens of an answer that nobody waits for: seconds, even for the scripted model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One loop for this folder's asynchronous tests: LangChain keeps its clients between them."""
    for item in items:
        if is_async_test(item) and HERE in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session", autouse=True)
def _no_open_connections(shared_gateway: Gateway) -> Iterator[None]:
    yield
    shutdown()


@pytest.fixture(autouse=True)
def _no_server_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAGCACHE_BASE_URL", raising=False)
    monkeypatch.delenv("RAGCACHE_API_KEY", raising=False)


@pytest.fixture(params=["http", "embedded"])
def chat(request: pytest.FixtureRequest, gateway: Gateway) -> Callable[..., ChatRagcache]:
    """Makes chat models over the gateway, with options; in each of the two ways."""
    where = {"base_url": gateway.url}
    if request.param == "embedded":
        where = {"engine": EmbeddedGateway(gateway.serving)}

    def make(**options: object) -> ChatRagcache:
        return ChatRagcache(**where, **options)

    return make


@pytest.fixture
def model(chat: Callable[..., ChatRagcache]) -> ChatRagcache:
    """A chat model that says what the script tells it."""
    return chat(temperature=0, max_tokens=200)


@pytest.fixture
def endless(chat: Callable[..., ChatRagcache], gateway: Gateway) -> ChatRagcache:
    """A chat model that goes on up to `LIMIT` tokens unless somebody stops it."""
    gateway.script.free = True
    return chat(temperature=0, max_tokens=LIMIT)


class Engine:
    """What the scripted gateway's engine has done since the test began."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._before = gateway.at_rest().computed_tokens

    @property
    def computed(self) -> int:
        """Tokens that went through the model."""
        return self._gateway.serving.stats().computed_tokens - self._before

    def begins(self) -> None:
        """Wait until an answer is under way."""
        deadline = time.monotonic() + 10
        while not (self._gateway.serving.stats().running and self.computed > 100):
            assert time.monotonic() < deadline, "nothing is generated"
            time.sleep(0.002)

    def stops(self) -> None:
        """Wait until nothing runs; that must be long before `LIMIT`, and leave no block held."""
        stats = self._gateway.at_rest()
        assert stats.pool.held == 0
        assert 0 < self.computed < LIMIT / 2


@pytest.fixture
def engine(gateway: Gateway) -> Engine:
    """The engine's counters."""
    return Engine(gateway)
