"""A supervisor and workers: `make example NAME=multi_agent`, or `python examples/multi_agent.py`.

All four agents send the same system prompt and the same tools, then the transcript. What an agent
is to do stands in the last message, and what it may answer is enforced token by token: a schema
for the supervisor, a tool for the historian. So each finds in the cache what the others computed.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_ragcache import CacheReport, ChatRagcache, passage_messages
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command
from pydantic import Field
from retrieval import retrieve

SYSTEM = SystemMessage("""\
You are one of the agents who write the labels of a museum of lighthouses, tides and bridges: a
supervisor, a historian, an engineer and a writer. Work from the passages in the conversation
alone, and do what the last message asks of you.""")

TASKS = {
    "historian": "Historian, search for who built the tower.",
    "engineer": "Engineer, how was the tower built?",
    "writer": "Writer, answer the question in one sentence for the label.",
}
QUESTION = "Why did the stone tower on the Eddystone rocks stand for so long?"


class State(MessagesState):
    done: Annotated[list[str], operator.add]  # the workers who have had their turn


@tool
def search(query: Annotated[str, Field(max_length=40)]) -> str:
    """Find the passage that says most about the query."""
    return retrieve(query, limit=1)[0].page_content


@tool
def convert(value: float, unit: str) -> str:
    """Convert a length in feet, or a speed in knots, to the metric unit."""
    factor, metric = (0.3048, "m") if unit == "feet" else (1.852, "km/h")
    return f"{value * factor:.1f} {metric}"


TOOLS = [search, convert]
Node = Callable[..., Awaitable[Any]]
Graph = CompiledStateGraph[State, None, State, State]


def supervisor(model: ChatRagcache) -> Node:
    async def supervise(state: State) -> Command[str]:
        left = [name for name in TASKS if name not in (*state["done"], "writer")]
        if not left:
            return Command(goto="writer")
        schema = {
            "type": "object",
            "properties": {"worker": {"enum": left}},
            "required": ["worker"],
        }
        # With the tools of the workers, which begin the prompt, although none is called here.
        choosing = model.with_structured_output(schema, tools=TOOLS)
        task = HumanMessage(f"Supervisor, choose the next agent: {', '.join(left)}.")
        chosen = await choosing.ainvoke([SYSTEM, *state["messages"], task])
        return Command(goto=chosen["worker"])

    return supervise


def worker(model: ChatRagcache, name: str) -> Node:
    choice = "search" if name == "historian" else "none"
    bound = model.bind_tools(TOOLS, tool_choice=choice)

    async def work(state: State) -> dict[str, Any]:
        task = HumanMessage(TASKS[name])
        answer = await bound.ainvoke([SYSTEM, *state["messages"], task])
        return {"messages": [task, answer], "done": [name]}

    return work


def build(model: ChatRagcache) -> Graph:
    builder = StateGraph(State)
    builder.add_node("supervisor", supervisor(model), destinations=tuple(TASKS))
    for name in TASKS:
        builder.add_node(name, worker(model, name))
    builder.add_node("tools", ToolNode(TOOLS))
    builder.add_edge(START, "supervisor")
    builder.add_edge("historian", "tools")
    builder.add_edge("tools", "supervisor")
    builder.add_edge("engineer", "supervisor")
    builder.add_edge("writer", END)
    return builder.compile()


async def main(model: ChatRagcache) -> CacheReport:
    report = CacheReport()
    asked = passage_messages(retrieve(QUESTION, limit=1), QUESTION)
    state = await build(model).ainvoke(
        State(messages=[*asked], done=[]), {"callbacks": [report], "recursion_limit": 20}
    )
    for message in state["messages"][len(asked) :]:
        message.pretty_print()
    print(f"\n{report}")
    print(
        "\nFour agents, one cold prompt: the others compute what was said since, and their task. "
        "Neither the schema nor the forced tool has changed the front of a prompt."
    )
    return report


if __name__ == "__main__":
    asyncio.run(main(ChatRagcache(temperature=0, max_tokens=40)))
