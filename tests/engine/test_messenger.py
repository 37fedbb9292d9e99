"""What the engine has to tell is told in order, by a thread that ends with the engine."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import pytest

from ragcache.engine import messenger as module
from ragcache.engine.messenger import Messenger
from ragcache.errors import EngineUnavailable
from ragcache.types import Token

ERROR = EngineUnavailable("the engine has been stopped")
EVENTS = [[("a", Token(0, number, None))] for number in range(100)]


class Sink:
    """Keeps what it is told, and by which threads; slow, so that whoever does not wait is seen."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.told: list[object] = []
        self.threads: set[threading.Thread] = set()
        self._breaks_at = breaks_at

    def deliver(self, events) -> None:
        time.sleep(0.001)
        if len(self.told) == self._breaks_at:
            raise ValueError("nobody listens")
        self._keep(events)

    def fail(self, error) -> None:
        time.sleep(0.05)
        self._keep(error)

    def _keep(self, message: object) -> None:
        self.told.append(message)
        self.threads.add(threading.current_thread())


def test_everything_is_told_in_order_and_the_failure_last():
    sink = Sink()
    messenger = Messenger(sink, pytest.fail)
    for events in EVENTS:
        messenger.deliver(events)
    messenger.fail(ERROR)
    assert sink.told == [*EVENTS, ERROR]


def test_one_other_thread_tells_and_ends_with_the_failure():
    sink = Sink()
    messenger = Messenger(sink, pytest.fail)
    messenger.deliver(EVENTS[0])
    messenger.fail(ERROR)
    (thread,) = sink.threads
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_a_delivery_does_not_wait_for_the_sink():
    sink, go_on = Sink(), threading.Event()
    sink.deliver = lambda events: go_on.wait(60)
    messenger = Messenger(sink, pytest.fail)
    messenger.deliver(EVENTS[0])
    messenger.deliver(EVENTS[1])
    go_on.set()
    messenger.fail(ERROR)
    assert sink.told == [ERROR]


def test_a_sink_that_broke_is_reported_at_once_and_told_of_the_failure_only(caplog):
    sink, reported = Sink(breaks_at=1), SimpleQueue()
    messenger = Messenger(sink, reported.put)
    messenger.deliver(EVENTS[0])
    messenger.deliver(EVENTS[1])
    assert reported.get(timeout=60) == "nobody can be told of events any more"
    assert "nobody listens" in caplog.text
    messenger._thread.join(60)
    with pytest.raises(RuntimeError, match="the thread that tells of events has died"):
        messenger.deliver(EVENTS[2])
    messenger.fail(ERROR)
    assert sink.told == [EVENTS[0], ERROR]
    assert reported.empty()


def test_a_sink_that_hangs_is_told_of_the_failure_once_and_by_another_thread(monkeypatch):
    monkeypatch.setattr(module, "TELL_WITHIN", 0.1)
    sink, go_on = Sink(), threading.Event()
    sink.deliver = lambda events: go_on.wait(60)
    messenger = Messenger(sink, pytest.fail)
    messenger.deliver(EVENTS[0])
    messenger.fail(ERROR)
    assert sink.told == [ERROR]
    go_on.set()
    messenger._thread.join(60)
    assert sink.told == [ERROR]
