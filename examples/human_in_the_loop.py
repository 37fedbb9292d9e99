"""Ask first: `make example NAME=human_in_the_loop` or `python examples/human_in_the_loop.py`.

An agent writes a label and wants to publish it. The graph stops before the tool runs, until a
curator has had a look. It then goes on from its checkpoint, in a graph that was built anew as if
by another process, and finds all of its prompt in the cache.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_ragcache import CacheReport, ChatRagcache, passage_messages
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt
from pydantic import Field
from retrieval import retrieve

SYSTEM = SystemMessage("""\
You write the labels of a museum of lighthouses, tides and bridges. Work from the passages in the
conversation alone, and publish each label once.""")

TOPIC = "Why are the tides of the Bay of Fundy so large?"
TASK = f"{TOPIC} Publish a label of one sentence."
REPORT = "Tell the curator in one sentence what you have done."


@tool
def publish(label: Annotated[str, Field(max_length=80)]) -> str:
    """Print a label and put it up in the exhibition."""
    return f"Printed: {label}"


TOOLS = [publish]
Graph = CompiledStateGraph[MessagesState, None, MessagesState, MessagesState]


def review(state: MessagesState) -> Command[Literal["publish", "report"]]:
    """Show the call to a human and wait for the decision, however long it takes."""
    (call,) = state["messages"][-1].tool_calls  # type: ignore[union-attr]
    if interrupt(call["args"]) == "yes":
        return Command(goto="publish")
    refused = ToolMessage("The curator did not agree.", tool_call_id=call["id"])
    return Command(goto="report", update={"messages": [refused]})


def build(model: ChatRagcache, checkpointer: BaseCheckpointSaver[Any]) -> Graph:
    writing = model.bind_tools(TOOLS, tool_choice="publish", parallel_tool_calls=False)
    reporting = model.bind_tools(TOOLS, tool_choice="none")

    async def write(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await writing.ainvoke([SYSTEM, *state["messages"]])]}

    async def report(state: MessagesState) -> dict[str, Any]:
        task = HumanMessage(REPORT)
        return {"messages": [await reporting.ainvoke([SYSTEM, *state["messages"], task])]}

    builder = StateGraph(MessagesState)
    builder.add_node("write", write)
    builder.add_node("review", review)
    builder.add_node("publish", ToolNode(TOOLS))
    builder.add_node("report", report)
    builder.add_edge(START, "write")
    builder.add_edge("write", "review")
    builder.add_edge("publish", "report")
    return builder.compile(checkpointer)


async def main(model: ChatRagcache) -> CacheReport:
    report = CacheReport()
    checkpointer = InMemorySaver()  # in production, one that keeps its checkpoints in a database
    config: RunnableConfig = {"configurable": {"thread_id": "label-1"}, "callbacks": [report]}

    asked = MessagesState(messages=[*passage_messages(retrieve(TOPIC, limit=1), TASK)])
    state = await build(model, checkpointer).ainvoke(asked, config)
    (question,) = state["__interrupt__"]
    print(f"May this be published? {question.value}\n  yes\n")

    state = await build(model, checkpointer).ainvoke(Command(resume="yes"), config)
    print(f"{state['messages'][-2].text}\n{state['messages'][-1].text.strip()}\n\n{report}")
    print(
        "\nThe step after the interruption reuses the whole prompt of the one before it, and the "
        "call that was decoded: a checkpoint gives the messages back as they were."
    )
    return report


if __name__ == "__main__":
    asyncio.run(main(ChatRagcache(temperature=0, max_tokens=48)))
