"""Clients over real sockets."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from pydantic import BaseModel
from pytest_asyncio import is_async_test
from scripted import embedded, gateway, make_gateway, shared_gateway, small_model

__all__ = ["embedded", "gateway", "make_gateway", "shared_gateway", "small_model"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One loop for this folder's asynchronous tests: LangChain keeps its clients between them."""
    for item in items:
        if is_async_test(item) and HERE in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session", autouse=True)
async def _no_open_clients() -> AsyncIterator[None]:
    yield
    for client in [each for each in gc.get_objects() if issubclass(type(each), httpx2.AsyncClient)]:
        await client.aclose()


class Blocking:
    """An asynchronous client, or a part of one, with the interface of the synchronous one."""

    _END = object()

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._target = target
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return self._seen(getattr(self._target, name))

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._seen(self._target(*args, **options))

    def __enter__(self) -> Any:
        return self._seen(self._target.__aenter__())

    def __exit__(self, *error: Any) -> None:
        self._seen(self._target.__aexit__(*error))

    def __iter__(self) -> Iterator[Any]:
        steps = aiter(self._target)
        while (item := self._result(anext(steps, self._END))) is not self._END:
            yield item

    def _seen(self, value: Any) -> Any:
        if inspect.isawaitable(value):
            value = self._result(value)
        of_client = type(value).__module__.startswith(("openai", "anthropic"))
        live = callable(value) or hasattr(value, "__aiter__") or of_client
        return Blocking(value, self._loop) if live and not isinstance(value, BaseModel) else value

    def _result(self, awaitable: Awaitable[Any]) -> Any:
        async def result() -> Any:
            return await awaitable

        return self._loop.run_until_complete(result())


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Opens an SDK's synchronous client, or its asynchronous one, which then blocks as well."""
    with ExitStack() as stack:
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)

        def connect(blocking: type, asynchronous: type, **options: Any) -> Any:
            if request.param == "sync":
                return stack.enter_context(blocking(**options))
            return stack.enter_context(Blocking(asynchronous(**options), loop))

        yield connect
