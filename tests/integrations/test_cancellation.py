"""Whoever leaves a call, a stream or a graph's run stops the model."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from contextlib import aclosing, closing, contextmanager, suppress

import pytest
from graphs import ALL, BLOCKING, async_graph, each_of, one_node, sync_graph
from langchain_core.exceptions import ModelConnectionError, ModelTimeoutError
from langchain_core.output_parsers import StrOutputParser
from langchain_ragcache import shutdown
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph

pytestmark = [
    pytest.mark.filterwarnings("ignore:create_react_agent has been moved"),
    pytest.mark.filterwarnings("ignore:The v3 streaming protocol"),
]

QUESTION = "What will I see?"
ASK = {"messages": [("user", QUESTION)]}


@pytest.fixture(autouse=True)
def _no_error_is_logged(caplog):
    yield
    assert not [each for each in caplog.get_records("call") if each.levelno >= logging.ERROR]


TOKENS = {"stream_mode": "messages", "subgraphs": True}


@each_of(ALL)
async def test_a_cancelled_stream_of_a_graph(endless, engine, make):
    async def consume():
        count = 0
        async for _ in make(endless).astream(ASK, **TOKENS):
            count += 1
            if count == 5:
                task.cancel()

    task = asyncio.create_task(consume())
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(engine.stops)


@each_of(ALL)
async def test_a_cancelled_call_of_a_graph(endless, engine, make):
    task = asyncio.create_task(make(endless).ainvoke(ASK))
    await asyncio.to_thread(engine.begins)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(engine.stops)


@each_of(ALL)
async def test_a_stream_of_a_graph_that_is_left(endless, engine, make):
    count = 0
    async for _ in make(endless).astream(ASK, **TOKENS):
        count += 1
        if count == 5:
            break
    await asyncio.to_thread(engine.stops)


@each_of(BLOCKING)
def test_a_synchronous_stream_of_a_graph_that_is_left(endless, engine, make):
    for count, _ in enumerate(make(endless).stream(ASK, **TOKENS)):
        if count == 5:
            break
    engine.stops()


def test_a_run_that_is_interrupted(endless, engine):
    with interrupted(engine), pytest.raises(KeyboardInterrupt):
        sync_graph(endless).invoke(ASK)
    engine.stops()


def test_what_a_node_asks_after_its_run_was_left(endless, engine):
    asked = threading.Event()

    def stubborn(state):
        for _ in range(2):
            with suppress(asyncio.CancelledError):
                endless.invoke(state["messages"])
        asked.set()
        return {}

    for _ in one_node(stubborn).stream(ASK, **TOKENS):
        break
    assert asked.wait(10)
    engine.stops()


def test_a_fallback_after_the_run_was_left(endless, engine):
    asked = threading.Event()
    retried = endless.with_fallbacks([endless]).with_retry(
        stop_after_attempt=2, wait_exponential_jitter=False
    )

    def node(state):
        try:
            retried.invoke(state["messages"])
        finally:
            asked.set()

    for _ in one_node(node).stream(ASK, **TOKENS):
        break
    assert asked.wait(10)
    engine.stops()


def test_nodes_side_by_side(endless, engine):
    graph = StateGraph(MessagesState)
    for name in ("one", "two", "three"):
        graph.add_node(name, lambda state: {"messages": [endless.invoke(state["messages"])]})
        graph.add_edge(START, name)
    for count, _ in enumerate(graph.compile().stream(ASK, **TOKENS)):
        if count == 20:
            break
    engine.stops()


def test_a_task_of_the_functional_api(endless, engine):
    @task
    def answer(question):
        return endless.invoke(question).text

    @entrypoint()
    def workflow(question):
        return answer(question).result()

    for count, _ in enumerate(workflow.stream(QUESTION, **TOKENS)):
        if count == 5:
            break
    engine.stops()


def test_a_run_that_has_ended_stays_so_for_the_next(model, gateway):
    """The second run has its own requests, and the node's thread may be the same one."""
    graph = sync_graph(model)
    for _ in graph.stream(ASK, **TOKENS):
        break
    assert graph.invoke(ASK)["messages"][-1].text == gateway.script.text


# The model by itself.


def test_a_stream_that_is_left(endless, engine):
    for count, _ in enumerate(endless.stream(QUESTION)):
        if count == 5:
            break
    engine.stops()


def test_a_stream_that_is_closed(endless, engine):
    with closing(endless.stream(QUESTION)) as stream:
        next(stream)
    engine.stops()


async def test_an_asynchronous_stream_that_is_left(endless, engine):
    count = 0
    async for _ in endless.astream(QUESTION):
        count += 1
        if count == 5:
            break
    await asyncio.to_thread(engine.stops)


async def test_a_stream_of_a_chain_that_is_left(endless, engine):
    async with aclosing((endless | StrOutputParser()).astream(QUESTION)) as stream:
        await anext(stream)
    await asyncio.to_thread(engine.stops)


async def test_a_stream_of_events_that_is_left(endless, engine):
    async with aclosing(endless.astream_events(QUESTION, version="v2")) as events:
        async for event in events:
            if event["event"] == "on_chat_model_stream":
                break
    await asyncio.to_thread(engine.stops)


async def test_a_stream_of_protocol_events_that_is_left(endless, engine):
    async with await async_graph(endless).astream_events(ASK, version="v3") as run:
        async for message in run.messages:
            async for _ in message.text:
                break
            break
    await asyncio.to_thread(engine.stops)


async def test_a_time_limit_around_a_call(endless, engine):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await endless.ainvoke(QUESTION)
    await asyncio.to_thread(engine.stops)


async def test_some_calls_of_many(endless, engine):
    tasks = [asyncio.create_task(endless.ainvoke(f"{QUESTION} {n}")) for n in range(12)]
    await asyncio.to_thread(engine.begins)
    for each in tasks:
        each.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await asyncio.to_thread(engine.stops)


@pytest.mark.parametrize("call", ["invoke", "stream"])
def test_the_time_limit_of_the_model(endless, engine, call):
    limited = endless.model_copy(update={"timeout": 0.5})
    with pytest.raises(ModelTimeoutError, match=r"0\.5 seconds"):
        list(getattr(limited, call)(QUESTION))
    engine.stops()


async def test_the_time_limit_of_the_model_in_asynchronous_calls(endless, engine):
    limited = endless.model_copy(update={"timeout": 0.5})
    with pytest.raises(ModelTimeoutError, match=r"0\.5 seconds"):
        await limited.ainvoke(QUESTION)
    with pytest.raises(ModelTimeoutError, match=r"0\.5 seconds"):
        _ = [chunk async for chunk in limited.astream(QUESTION)]
    await asyncio.to_thread(engine.stops)


@contextmanager
def interrupted(engine):
    """Sends Ctrl-C to the main thread once an answer is under way."""

    def interrupt():
        engine.begins()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("call", ["invoke", "stream"])
def test_ctrl_c(endless, engine, call):
    with interrupted(engine), pytest.raises(KeyboardInterrupt):
        list(getattr(endless, call)(QUESTION))
    engine.stops()


@pytest.mark.parametrize("call", ["invoke", "stream"])
def test_a_shutdown_ends_what_runs(endless, engine, call):
    thread = threading.Thread(target=lambda: (engine.begins(), shutdown()))
    thread.start()
    with pytest.raises(ModelConnectionError):
        list(getattr(endless, call)(QUESTION))
    thread.join()
    engine.stops()


async def test_a_shutdown_ends_what_runs_for_other_loops(endless, engine):
    task = asyncio.create_task(endless.ainvoke(QUESTION))
    await asyncio.to_thread(engine.begins)
    await asyncio.to_thread(shutdown)
    with pytest.raises(ModelConnectionError):
        await task
    await asyncio.to_thread(engine.stops)
