"""Where a chat model is used from: with a loop, inside of one, from many, from threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from graphs import agent, async_graph
from langchain_ragcache import shutdown

QUESTION = "What will I see?"
ASK = {"messages": [("user", QUESTION)]}


async def said(model):
    return "".join([chunk.text async for chunk in model.astream(QUESTION)])


async def test_synchronous_calls_inside_a_running_loop(model, gateway):
    assert model.invoke(QUESTION).text == gateway.script.text
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == gateway.script.text
    assert [each.text for each in model.batch([QUESTION] * 3)] == [gateway.script.text] * 3
    assert agent(model).invoke(ASK)["messages"][-1].text == gateway.script.text
    assert model.get_num_tokens(QUESTION) > 3
    assert model.load().profile["max_input_tokens"] == 8192
    assert model.warm("You are brief.")["output_tokens"] == 0


def test_one_loop_after_another(model, gateway):
    for _ in range(2):
        assert asyncio.run(said(model)) == gateway.script.text
        assert asyncio.run(model.ainvoke(QUESTION)).text == gateway.script.text
        assert model.invoke(QUESTION).text == gateway.script.text


def test_a_loop_that_ends_in_the_middle_of_a_call(endless, engine):
    """`asyncio.run` cancels it, and closes the loop that its chunks would go to."""

    async def leave():
        task = asyncio.create_task(said(endless))
        while engine.computed < 100:
            await asyncio.sleep(0.002)
        return task

    assert asyncio.run(leave()).cancelled()
    engine.stops()


def test_several_loops_and_threads_at_once(model, gateway):
    uses = [
        lambda: model.invoke(QUESTION).text,
        lambda: asyncio.run(said(model)),
        lambda: "".join(chunk.text for chunk in model.stream(QUESTION)),
        lambda: asyncio.run(async_graph(model).ainvoke(ASK))["messages"][-1].text,
    ]
    start = threading.Barrier(8)

    def use(number):
        start.wait()
        return uses[number % 4]()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(use, range(8))) == {gateway.script.text}


@pytest.mark.parametrize("times", [1, 2])
def test_calls_after_a_shutdown(model, gateway, times):
    assert model.invoke(QUESTION).text == gateway.script.text
    for _ in range(times):
        shutdown()
    assert not [each for each in threading.enumerate() if each.name == "langchain-ragcache"]
    assert model.invoke(QUESTION).text == gateway.script.text
    assert asyncio.run(said(model)) == gateway.script.text
