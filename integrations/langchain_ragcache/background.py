"""The event loop, in a thread of its own, on which all requests of the process run.

Connections and the engine belong to one loop that outlives every caller's: a chat model works in
synchronous code, inside a running loop, and in one loop after another, without a connection that
belongs to a loop that is closed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import aclosing, suppress
from contextvars import Context
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

from langchain_core.exceptions import ModelConnectionError

from langchain_ragcache.langgraph_runs import cancel_with_run

T = TypeVar("T")
_END: Any = object()


class BackgroundLoop:
    """Runs coroutines for callers in other threads and loops.

    A caller that is cancelled, interrupted or closed cancels what runs for it. What a LangGraph run
    leaves behind ends with `asyncio.CancelledError`, which no retry or fallback takes for a failure
    of the model; what `close` ends, with `ModelConnectionError`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closing = False
        self._futures: WeakSet[Future[Any]] = WeakSet()
        # In a context of its own, or the first caller's would live as long as the loop.
        self._loop = Context().run(asyncio.new_event_loop)
        self._thread = threading.Thread(target=self._run, name="langchain-ragcache", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, for synchronous callers."""
        future = self._submit(work)
        cancel_with_run(future)
        try:
            return future.result()
        except CancelledError:
            raise self._end() from None
        finally:
            future.cancel()  # does nothing but after an interruption

    async def result(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, for callers on another event loop."""
        try:
            return await asyncio.wrap_future(self._submit(work))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._end() from None

    def iterate(self, source: AsyncGenerator[T]) -> Iterator[T]:
        """The items of `source`, for synchronous callers; closing the iterator closes it too."""
        arrived: SimpleQueue[T] = SimpleQueue()
        pump = self._submit(_pump(source, arrived.put))
        pump.add_done_callback(lambda _: arrived.put(_END))
        cancel_with_run(pump)
        try:
            while (item := arrived.get()) is not _END:
                yield item
            pump.result()
        except CancelledError:
            raise self._end() from None
        finally:
            pump.cancel()

    async def aiterate(self, source: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """The same for callers on another event loop."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[T] = asyncio.Queue()

        def put(item: T) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, item)

        def end(_: Future[None]) -> None:
            with suppress(RuntimeError):  # the caller's loop is closed: nobody waits for the end
                put(_END)

        pump = self._submit(_pump(source, put))
        pump.add_done_callback(end)
        try:
            while (item := await arrived.get()) is not _END:
                yield item
            pump.result()
        except CancelledError:
            raise self._end() from None
        finally:
            pump.cancel()

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Take nothing more, cancel what still runs, run `last` and end the thread."""
        with self._lock:
            self._closing = True
            running = list(self._futures)
        for future in running:
            future.cancel()
        asyncio.run_coroutine_threadsafe(_finish(last), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._closing:
                work.close()
                raise self._end()
            future: Future[T] = Future()
            self._loop.call_soon_threadsafe(self._start, work, future)
            self._futures.add(future)
            return future

    def _start(self, work: Coroutine[Any, Any, T], future: Future[T]) -> None:
        task = self._loop.create_task(_fill(future, work))

        def cancel(ended: Future[T]) -> None:
            if ended.cancelled():
                self._loop.call_soon_threadsafe(task.cancel)

        future.add_done_callback(cancel)

    def _end(self) -> BaseException:
        """Why something was cancelled that its caller has not cancelled."""
        if self._closing:
            return ModelConnectionError("langchain_ragcache was shut down")
        return asyncio.CancelledError("the run of the graph was left")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


async def _pump(source: AsyncGenerator[T], put: Callable[[T], None]) -> None:
    async with aclosing(source):
        async for item in source:
            put(item)


async def _fill(future: Future[T], work: Coroutine[Any, Any, T]) -> None:
    """Hand over the outcome at once; `run_coroutine_threadsafe` takes another turn of the loop."""
    try:
        result = await work
    except asyncio.CancelledError:
        future.cancel()
        raise
    except BaseException as error:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        if future.set_running_or_notify_cancel():
            future.set_result(result)
    finally:
        del future, work  # an exception, and with it this frame, may be kept for long


async def _finish(last: Coroutine[Any, Any, None]) -> None:
    await last
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
