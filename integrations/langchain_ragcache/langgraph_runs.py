"""Synchronous nodes of a LangGraph run that is left before they end.

Leaving a graph's stream, or cancelling its task, cancels asynchronous nodes. A synchronous node is
a thread, which nothing can cancel: the run waits for it, and the model would go on until its last
token. But the run closes an exit stack before it waits, and what is on that stack can cancel the
request that the thread is waiting for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from langchain_core.runnables.config import ensure_config


def cancel_with_run(future: Future[Any]) -> None:
    """Cancel `future` if one of the LangGraph runs around this call is left, or fails, before it.

    A run that ends as it should cancels nothing, so that work which a node has handed to another
    thread goes on. Does nothing outside of a graph, or where LangGraph does not show its runs in
    the place that versions 1.0 to 1.2 do.
    """
    for stack in _exit_stacks(ensure_config().get("configurable", {})):
        with _lock:
            run = _runs.get(stack) or _runs.setdefault(stack, _Run(stack))
            run.add(future)


class _Run:
    """The requests under way in a run; those that come after it was left are cancelled at once."""

    def __init__(self, stack: ExitStack | AsyncExitStack) -> None:
        self._futures: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self._left = False
        stack.push(self._exit)

    def add(self, future: Future[Any]) -> None:
        self._futures.add(future)
        if self._left:
            future.cancel()

    def _exit(self, kind: type[BaseException] | None, *_: object) -> None:
        with _lock:
            self._left = kind is not None
            for future in list(self._futures) if self._left else ():
                future.cancel()


_runs: weakref.WeakKeyDictionary[ExitStack | AsyncExitStack, _Run] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # cancelling calls back


def _exit_stacks(configurable: dict[str, Any]) -> Iterator[ExitStack | AsyncExitStack]:
    """Those of the run that `configurable` belongs to, and of the runs around it."""
    seen: set[int] = set()
    while (loop := _loop_of(configurable)) is not None and id(loop) not in seen:
        seen.add(id(loop))
        if isinstance(stack := getattr(loop, "stack", None), ExitStack | AsyncExitStack):
            yield stack
        configurable = getattr(loop, "config", {}).get("configurable", {})


def _loop_of(configurable: dict[str, Any]) -> object | None:
    call = configurable.get("__pregel_call")
    schedule = getattr(call, "keywords", {}).get("schedule_task")
    return getattr(schedule, "__self__", None)
