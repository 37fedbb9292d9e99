"""LangGraph graphs around one chat model: those that people build, and those inside of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import create_react_agent

Make = Callable[[BaseChatModel], CompiledStateGraph]

SYSTEM = "You answer from the passages given, and say so when they do not tell. " * 8


@tool
def weather(city: str) -> str:
    """Look up the weather in a city."""
    get_stream_writer()(f"looking at {city}")
    return f"{len(city)} degrees in {city}"


def one_node(node: Any) -> CompiledStateGraph:
    """A graph of a single node."""
    graph = StateGraph(MessagesState)
    graph.add_node("answer", node)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    return graph.compile()


def sync_graph(model: BaseChatModel) -> CompiledStateGraph:
    """A synchronous node that calls the model."""
    return one_node(lambda state: {"messages": [model.invoke(state["messages"])]})


def async_graph(model: BaseChatModel) -> CompiledStateGraph:
    """An asynchronous node that calls the model."""

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    return one_node(answer)


def agent(model: BaseChatModel) -> CompiledStateGraph:
    """An agent of LangChain."""
    return create_agent(model, [weather], system_prompt=SYSTEM)


def react_agent(model: BaseChatModel) -> CompiledStateGraph:
    """The agent that LangGraph had before."""
    return create_react_agent(model, [weather], prompt=SYSTEM)


def nested(make: Make) -> Make:
    """A graph that is a node of another."""

    def make_nested(model: BaseChatModel) -> CompiledStateGraph:
        return one_node(make(model))

    make_nested.__name__ = f"nested_{make.__name__}"
    return make_nested


def called(make: Make) -> Make:
    """A graph that a node of another calls."""

    def make_called(model: BaseChatModel) -> CompiledStateGraph:
        inner = make(model)
        return one_node(lambda state: {"messages": inner.invoke(state)["messages"]})

    make_called.__name__ = f"called_{make.__name__}"
    return make_called


BLOCKING = [sync_graph, agent, react_agent, nested(sync_graph), nested(agent), called(sync_graph)]
ALL = [async_graph, nested(async_graph), *BLOCKING]


def each_of(makes: list[Make]) -> pytest.MarkDecorator:
    """Runs a test, of a parameter `make`, with each of these graphs."""
    return pytest.mark.parametrize("make", makes, ids=lambda make: make.__name__)
