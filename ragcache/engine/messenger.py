"""Events on their way from the engine thread, which does not wait for whom it tells."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from ragcache.engine.answers import Events
from ragcache.engine.loop import EventSink
from ragcache.errors import EngineUnavailable

log = logging.getLogger(__name__)

TELL_WITHIN = 5.0  # seconds that a sink may take to hear what it was not told before a failure


class Messenger:
    """An event sink that tells another one, on a thread of its own, until the engine fails or ends.

    To wake an event loop takes a system call, for which the interpreter is let go; the loop's
    thread takes it then, and the engine's would wait for it with the next step to begin.

    `on_error` is called once, with a reason, if the sink raises: an engine that is idle would not
    come to know of it by the next delivery.
    """

    def __init__(self, sink: EventSink, on_error: Callable[[str], None]) -> None:
        self._sink = sink
        self._on_error = on_error
        self._messages: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(target=self._main, name="ragcache-events", daemon=True)
        self._thread.start()

    def deliver(self, events: Events) -> None:
        """See `EventSink`; raises RuntimeError if the other one cannot be told any more."""
        if not self._thread.is_alive():
            raise RuntimeError("the thread that tells of events has died")
        self._messages.put(partial(self._sink.deliver, events))

    def fail(self, error: EngineUnavailable) -> None:
        """See `EventSink`; returns when it has been told, if need be past a thread that hangs."""
        self._messages.put(partial(self._end, error))
        self._thread.join(TELL_WITHIN)
        if not self._ended:
            self._end(error)

    def _end(self, error: EngineUnavailable) -> None:
        self._sink.fail(error)
        self._ended = True

    def _main(self) -> None:
        try:
            while not self._ended:
                self._messages.get()()
        except Exception:
            log.exception("whoever is told of events broke down")
            self._on_error("nobody can be told of events any more")
