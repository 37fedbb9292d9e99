"""The engine thread as coroutines see it."""

import asyncio
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from ragcache.bench.hashing import HashRunner
from ragcache.config import ServeSettings
from ragcache.engine.bridge import EngineClient, Limits, Mailboxes
from ragcache.engine.loop import Engine
from ragcache.engine.request import Request
from ragcache.engine.scheduler import Scheduler
from ragcache.errors import (
    EngineUnavailable,
    GenerationFailed,
    QueueTimeout,
    RequestTimeout,
    ShuttingDown,
)
from ragcache.loading import start_engine
from ragcache.prefix.cache import PrefixCache
from ragcache.types import Admitted, Finished, FinishReason, SamplingParams, Token


class SlowRunner(HashRunner):
    """Takes a moment a step, and fails at the step it is told to."""

    fail_at = -1
    steps = 0
    pause = 0.002  # seconds

    def run(self, batch, *meanwhile):
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("the device is gone")
        time.sleep(self.pause)
        return super().run(batch, *meanwhile)


@pytest.fixture
def runner():
    return SlowRunner(64, 4, 61)


@pytest.fixture
def client(runner):
    cache = PrefixCache(64, 4)
    mailboxes = Mailboxes()
    engine = Engine(runner, Scheduler(cache, max_batch_tokens=16, max_running=4), mailboxes)
    engine.start()
    yield EngineClient(engine, mailboxes, Limits(max_requests=6))
    engine.stop()
    assert runner.fail_at > 0 or cache.counts().held == 0
    cache.check()


def request(name, max_tokens=8, prompt=(1, 2, 3, 4, 5), **options):
    sampling = SamplingParams(max_tokens, temperature=0.0, **options)
    return Request(name, list(prompt), sampling, b"n", frozenset())


async def collect(subscription):
    return [event async for events in subscription for event in events]


async def idle(client):  # the snapshot is all that the engine shows of itself
    while client.engine.stats.running or client.engine.stats.waiting:
        await asyncio.sleep(0.005)


async def test_events_arrive_in_order_and_end(client, runner):
    events = await collect(client.submit(request("a")))
    tokens = [event.token_id for event in events if isinstance(event, Token)]
    context = [1, 2, 3, 4, 5]
    for token in tokens:
        assert token == int(runner.logits(np.asarray(context)).argmax())
        context.append(token)
    assert events[-1] == Finished(0, FinishReason.LENGTH, 8)
    assert len(client._mailboxes) == 0


async def test_closing_early_stops_the_generation(client, runner):
    subscription = client.submit(request("a", max_tokens=200))
    async for _ in subscription:
        break
    subscription.close()
    subscription.close()
    await idle(client)
    steps = runner.steps
    await asyncio.sleep(0.05)
    assert runner.steps == steps < 100
    assert client.engine.stats.pool.held == 0


@pytest.fixture
def hang(runner):
    """Lets the next step wait until the test has ended, or calls what it gets."""
    go_on, run = threading.Event(), runner.run
    runner.run = lambda batch, meanwhile: meanwhile() or (go_on.wait(60) and run(batch))
    yield go_on.set
    go_on.set()


def limited(client, **seconds):
    client.limits = Limits(max_requests=6, **seconds)


async def test_what_waits_too_long_is_never_begun(client, runner):
    limited(client, queue_timeout=0.1)
    runner.pause = 0.02
    busy = [client.submit(request(str(i), max_tokens=50, prompt=(i,) * 5)) for i in range(4)]
    for subscription in busy:
        await anext(aiter(subscription))
    before = client.engine.stats.query_tokens
    ended = []
    late = client.submit(request("late"), ended=lambda: ended.append(True))
    with pytest.raises(QueueTimeout, match=r"waited for 0\.1 s") as caught:
        await collect(late)
    assert caught.value.retry_after
    assert ended
    for subscription in busy:  # which run longer than anything may wait
        assert not isinstance(await anext(aiter(subscription)), Exception)
        subscription.close()
    await idle(client)
    assert client.engine.stats.query_tokens == before
    assert len(client._mailboxes) == 0


async def test_what_takes_too_long_ends_and_gives_its_blocks_back(client):
    limited(client, request_timeout=0.1)
    subscription = client.submit(request("a", max_tokens=100, n=2))
    deliveries = aiter(subscription)
    assert isinstance((await anext(deliveries))[0], Admitted)
    with pytest.raises(RequestTimeout, match=r"longer than 0\.1 s"):
        assert not [some async for some in deliveries if isinstance(some[-1], Finished)]
    await idle(client)
    assert client.engine.stats.pool.held == 0


async def test_time_is_up_for_a_reader_that_does_not_read(client):
    limited(client, request_timeout=0.05)
    subscription = client.submit(request("a", max_tokens=240))
    await idle(client)
    assert client.engine.stats.pool.held == 0
    with pytest.raises(RequestTimeout):
        await collect(subscription)


async def test_time_is_up_even_while_the_engine_hangs(client, hang):
    limited(client, queue_timeout=0.05, request_timeout=0.1)
    running = client.submit(request("a"))
    await anext(aiter(running))
    waiting = client.submit(request("b"))
    with pytest.raises(QueueTimeout):
        await collect(waiting)
    with pytest.raises(RequestTimeout):
        await collect(running)
    hang()
    limited(client)
    assert await collect(client.submit(request("c")))


async def test_what_ends_in_time_leaves_no_timer(client):
    limited(client, queue_timeout=100, request_timeout=200)
    subscription = client.submit(request("a"))
    assert await collect(subscription)
    assert subscription._timer.cancelled()


async def test_all_requests_can_be_failed_even_while_the_engine_hangs(client, hang):
    running = client.submit(request("a"))
    client.close(ShuttingDown("the end"))
    with pytest.raises(ShuttingDown, match="the end"):
        await collect(running)
    with pytest.raises(ShuttingDown):
        client.submit(request("b"))
    running.close()


async def test_an_engine_is_stalled_only_in_a_step_that_does_not_end(client, hang):
    assert client.engine.stalled == 0
    running = client.submit(request("a"))
    while client.engine.stalled < 0.05:
        await asyncio.sleep(0.01)
    assert "go_on.wait(60)" in client.engine.stack()
    hang()
    await collect(running)
    async with asyncio.timeout(10):
        while client.engine.stalled:
            await asyncio.sleep(0.01)


async def test_a_dead_engine_fails_every_request_and_only_the_log_tells_why(client, runner, caplog):
    message = "the engine has failed; the server's log tells why"
    runner.fail_at = 3
    running = [client.submit(request(str(i), max_tokens=50)) for i in range(3)]
    results = await asyncio.gather(*map(collect, running), return_exceptions=True)
    for error in results:
        assert isinstance(error, EngineUnavailable)
        assert error.message == message
    with pytest.raises(EngineUnavailable, match=message):
        client.submit(request("later"))
    with pytest.raises(EngineUnavailable):
        await client.drop(b"n")
    assert client.engine.failure is not None
    assert "the device is gone" in caplog.text
    stats = client.engine.stats
    assert (stats.running, stats.waiting, stats.pool.total) == (0, 0, 0)
    assert stats.query_tokens == 15


async def test_what_came_of_the_last_step_is_told_before_the_failure(client, runner):
    runner.fail_at = 3
    told = []
    with suppress(EngineUnavailable):
        async for events in client.submit(request("a")):
            told += events
    assert sum(isinstance(event, Token) for event in told) == 2


async def test_broken_accounts_do_not_keep_the_last_events_back(client, runner, monkeypatch):
    runner.fail_at = 3
    counts, told = client.engine._cache.counts, []
    monkeypatch.setattr(
        client.engine._cache, "counts", lambda: counts() if runner.steps < 3 else 1 / 0
    )
    with suppress(EngineUnavailable):
        async for events in client.submit(request("a")):
            told += events
    assert sum(isinstance(event, Token) for event in told) == 2


async def test_last_events_that_cannot_be_told_are_logged(client, runner, monkeypatch, caplog):
    runner.fail_at = 3
    deliver = client._mailboxes.deliver
    monkeypatch.setattr(
        client._mailboxes, "deliver", lambda each: deliver(each) if runner.steps < 3 else 1 / 0
    )
    with pytest.raises(EngineUnavailable):
        await collect(client.submit(request("a")))
    assert "the device is gone" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_an_idle_engine_fails_when_nobody_can_be_told_any_more(runner, monkeypatch):
    client = start_engine(runner, 64, ServeSettings())

    def deliver(events):
        assert not any(isinstance(event, Finished) for _, event in events)

    monkeypatch.setattr(client._mailboxes, "deliver", deliver)
    with pytest.raises(EngineUnavailable, match="the engine has failed"):
        await asyncio.wait_for(collect(client.submit(request("a", max_tokens=1))), 10)
    client.engine.stop()


async def test_a_question_that_fails_is_the_askers_affair_alone(client, monkeypatch):
    def broken(*args):
        raise LookupError("a bug in the walk")

    monkeypatch.setattr(client.engine._cache, "hottest", broken)
    running = client.submit(request("a", max_tokens=40))
    with pytest.raises(LookupError, match="a bug in the walk"):
        await asyncio.wait_for(client.hottest(b"n", 3), 10)
    assert await collect(running)
    assert await collect(client.submit(request("b")))
    assert client.engine.failure is None


async def test_a_change_that_fails_half_way_ends_the_engine_and_keeps_nobody_waiting(
    client, runner, monkeypatch
):
    runner.fail_at = 100_000  # what runs is never ended

    def broken(owner):
        raise LookupError("a bug in the change")

    monkeypatch.setattr(client.engine._cache, "drop", broken)
    running = client.submit(request("a", max_tokens=10_000))
    with pytest.raises(LookupError, match="a bug in the change"):
        await asyncio.wait_for(client.drop(b"n"), 10)
    with pytest.raises(EngineUnavailable, match="the engine has failed"):
        await asyncio.wait_for(collect(running), 10)


async def test_a_bug_in_the_idle_check_is_logged_and_ends_nothing(client, monkeypatch, caplog):
    def broken():
        raise LookupError("a bug in the check")

    with monkeypatch.context() as patch:
        patch.setattr("ragcache.engine.loop.IDLE_CHECK_AFTER", 0.01)
        patch.setattr(client.engine._cache, "check", broken)
        assert await collect(client.submit(request("a")))
        async with asyncio.timeout(10):
            while "a bug in the check" not in caplog.text:
                await asyncio.sleep(0.01)
    assert await collect(client.submit(request("b")))


async def test_drop_forgets_at_once_even_while_requests_run(client):
    subscription = client.submit(request("a", max_tokens=60))
    async for events in subscription:
        if any(isinstance(event, Token) for event in events):
            break
    assert await client.drop(b"other") == 0
    assert await client.drop(b"n") > 0
    assert client.engine.stats.running == 1
    subscription.close()
    await idle(client)
    assert client.engine.stats.pool.cached == 0


async def test_many_event_loops_share_one_engine(client):
    def in_another_loop(name):
        async def run():
            return await collect(client.submit(request(name)))

        return asyncio.run(run())

    answers = await asyncio.gather(
        *(asyncio.to_thread(in_another_loop, str(i)) for i in range(3)),
        collect(client.submit(request("here"))),
    )
    texts = {tuple(e.token_id for e in events if isinstance(e, Token)) for events in answers}
    assert len(texts) == 1


async def test_a_loop_that_is_gone_takes_its_requests_along(client):
    async def leave():
        client.submit(request("a", max_tokens=500))

    await asyncio.to_thread(lambda: asyncio.run(leave()))
    await idle(client)
    assert client.engine.stats.pool.held == 0


async def test_one_choice_can_be_finished_by_the_reader(client):
    subscription = client.submit(request("a", max_tokens=100, n=2))
    finished = {}
    async for events in subscription:
        for event in events:
            if isinstance(event, Token) and event.index == 1:
                subscription.finish(1)
            if isinstance(event, Finished):
                finished[event.index] = event.reason
    assert finished == {0: FinishReason.LENGTH, 1: FinishReason.STOP}


async def test_a_drop_that_nobody_waits_for_any_more_is_harmless(client):
    running = client.submit(request("a", max_tokens=40))
    for _ in range(20):
        drop = asyncio.ensure_future(client.drop(b"n"))
        await asyncio.sleep(0)
        drop.cancel()
    assert await collect(running)
    assert await client.drop(b"n") >= 0
    assert client.engine.failure is None


async def test_a_failed_request_is_an_error_and_the_next_one_is_served(client, runner):
    logits = runner.logits
    runner.logits = lambda context: logits(context) * float("nan")
    with pytest.raises(GenerationFailed, match="not a number"):
        await collect(client.submit(request("a")))
    runner.logits = logits
    assert await collect(client.submit(request("b")))
