"""What the engine has to tell is told in order, by a thread that ends with the engine."""

from __future__ import annotations

import threading
import time

import pytest

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
    messenger = Messenger(sink)
    for events in EVENTS:
        messenger.deliver(events)
    messenger.fail(ERROR)
    assert sink.told == [*EVENTS, ERROR]


def test_one_other_thread_tells_and_ends_with_the_failure():
    sink = Sink()
    messenger = Messenger(sink)
    messenger.deliver(EVENTS[0])
    messenger.fail(ERROR)
    (thread,) = sink.threads
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_a_delivery_does_not_wait_for_the_sink():
    sink, go_on = Sink(), threading.Event()
    sink.deliver = lambda events: go_on.wait(60)
    messenger = Messenger(sink)
    messenger.deliver(EVENTS[0])
    messenger.deliver(EVENTS[1])
    go_on.set()
    messenger.fail(ERROR)
    assert sink.told == [ERROR]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_a_sink_broke_deliveries_raise_and_it_is_told_of_the_failure():
    sink = Sink(breaks_at=1)
    messenger = Messenger(sink)
    messenger.deliver(EVENTS[0])
    messenger.deliver(EVENTS[1])
    messenger._thread.join(60)
    with pytest.raises(RuntimeError, match="the thread that tells of events has died"):
        messenger.deliver(EVENTS[2])
    messenger.fail(ERROR)
    assert sink.told == [EVENTS[0], ERROR]
