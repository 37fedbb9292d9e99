"""The end of everything, while calls still run; and what goes on after the end of a run."""

import asyncio
import threading
import time
from contextlib import suppress

import pytest
from langchain_core.exceptions import ModelConnectionError
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langchain_ragcache import shutdown
from langgraph.graph import START, MessagesState, StateGraph

QUESTION = "What of it?"
SHUT_DOWN = "was shut down"


@pytest.fixture
def shut_down_soon(engine):
    """Shuts everything down once an answer is under way."""

    def wait_and_shut_down():
        engine.begins()
        shutdown()

    thread = threading.Thread(target=wait_and_shut_down)
    thread.start()
    yield
    thread.join(20)
    engine.stops()


@pytest.mark.usefixtures("shut_down_soon")
def test_an_invoke_fails_as_a_lost_connection(endless):
    with pytest.raises(ModelConnectionError, match=SHUT_DOWN):
        endless.invoke(QUESTION)


@pytest.mark.usefixtures("shut_down_soon")
def test_a_stream_fails_as_a_lost_connection(endless):
    with pytest.raises(ModelConnectionError, match=SHUT_DOWN):
        list(endless.stream(QUESTION))


@pytest.mark.usefixtures("shut_down_soon")
async def test_an_ainvoke_fails_as_a_lost_connection(endless):
    with pytest.raises(ModelConnectionError, match=SHUT_DOWN):
        await endless.ainvoke(QUESTION)


@pytest.mark.usefixtures("shut_down_soon")
async def test_an_astream_fails_as_a_lost_connection(endless):
    with pytest.raises(ModelConnectionError, match=SHUT_DOWN):
        _ = [chunk async for chunk in endless.astream(QUESTION)]


def test_calls_that_race_with_shutdowns_fail_clearly_or_succeed(model, gateway):
    def call():
        for _ in range(10):
            with suppress(ModelConnectionError):
                assert model.invoke(QUESTION).text == gateway.script.text

    failures = []
    threading.excepthook, before = failures.append, threading.excepthook
    try:
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            shutdown()
            time.sleep(0.02)
    finally:
        threading.excepthook = before
    assert not failures
    assert model.invoke(QUESTION).text == gateway.script.text


def graph_of(node):
    return StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()


def test_work_that_outlives_a_run_which_ends_well_goes_on(endless, engine):
    handed_over = []
    short = endless.bind(max_tokens=300)

    def node(state):
        handed_over.append(ContextThreadPoolExecutor(1).submit(short.invoke, QUESTION))
        engine.begins()
        return {}

    graph_of(node).invoke({"messages": [("user", QUESTION)]})
    assert handed_over[0].result(30).usage_metadata["output_tokens"] == 300


def test_a_context_that_outlives_its_run_can_be_called_in(model, gateway):
    import contextvars

    kept = []

    def node(state):
        kept.append(contextvars.copy_context())
        return {"messages": [model.invoke(QUESTION)]}

    graph_of(node).invoke({"messages": [("user", QUESTION)]})
    assert kept[0].run(model.invoke, QUESTION).text == gateway.script.text


def test_a_run_that_is_left_is_no_failure_of_the_model(endless, engine):
    ended = []

    def node(state):
        try:
            endless.with_fallbacks([endless]).invoke(QUESTION)
        except BaseException as error:
            ended.append(error)
            raise

    for _ in graph_of(node).stream({"messages": [("user", QUESTION)]}, stream_mode="messages"):
        break
    assert [type(error) for error in ended] == [asyncio.CancelledError]
    engine.stops()
