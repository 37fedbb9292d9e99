"""Parallel branches: run `make example NAME=fan_out`, or `python examples/fan_out.py`.

Four branches of a graph ask different questions about the same passages, at the same moment, and
nothing of their prompts is in the cache yet. One of them computes what they have in common while
the others wait for it. The second run computes the system prompt while it retrieves the passages.
"""

from __future__ import annotations

import asyncio
import operator
from typing import Annotated, Any, TypedDict
from uuid import uuid4

from langchain_core.documents import Document
from langchain_core.messages import SystemMessage
from langchain_ragcache import CacheReport, ChatRagcache, passage_messages
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Send
from retrieval import retrieve

SYSTEM = """\
You help the curators of a museum of lighthouses, tides and bridges to check the labels of their
exhibition. Work from the passages in the conversation alone. Answer in a few words, without an
introduction, and say "not in the passages" where they do not hold the answer."""

TOPIC = "lighthouses on the Eddystone rocks and Bell Rock"
QUESTIONS = [
    "Who built the tower of timber?",
    "When did the Great Storm come?",
    "Which tower was built of stone that interlocks?",
    "Why was the stone tower replaced?",
]


class State(TypedDict):
    topic: str
    passages: list[Document]
    answers: Annotated[list[str], operator.add]


class Branch(TypedDict):
    passages: list[Document]
    question: str


async def find(state: State) -> dict[str, Any]:
    return {"passages": retrieve(state["topic"], limit=2)}


def branches(state: State) -> list[Send]:
    """A branch for each question, all with the same passages in the same order."""
    return [
        Send("answer", Branch(passages=state["passages"], question=question))
        for question in QUESTIONS
    ]


def build(
    model: ChatRagcache, report: CacheReport, *, warm: bool
) -> CompiledStateGraph[State, None, State, State]:
    async def answer(state: Branch) -> dict[str, Any]:
        passages = passage_messages(state["passages"], state["question"])
        said = await model.ainvoke([SystemMessage(SYSTEM), *passages])
        return {"answers": [f"{state['question']} {said.text.strip()}"]}

    async def warm_up(state: State) -> None:
        report.add("warm", await model.awarm(SYSTEM))

    builder = StateGraph(State)
    builder.add_node("find", find)
    builder.add_node("answer", answer, input_schema=Branch)
    builder.add_edge(START, "find")
    builder.add_conditional_edges("find", branches, ["answer"])
    if warm:  # beside the retrieval
        builder.add_node("warm", warm_up)
        builder.add_edge(START, "warm")
    return builder.compile()


async def run(model: ChatRagcache, *, warm: bool) -> CacheReport:
    """Run the graph over a cold cache and print its table."""
    report = CacheReport()
    # What has a salt of its own was never computed before, even by a gateway that runs for days.
    cold = model.model_copy(update={"cache_salt": uuid4().hex})
    graph = build(cold, report, warm=warm)
    state = await graph.ainvoke(
        State(topic=TOPIC, passages=[], answers=[]), {"callbacks": [report]}
    )
    print("\n".join(state["answers"]), f"\n\n{report}\n")
    return report


async def main(model: ChatRagcache) -> list[CacheReport]:
    reports = [await run(model, warm=False), await run(model, warm=True)]
    print(
        "The branches' common prompt is computed once, by one of them. In the second table its "
        "system part was ready before the passages were."
    )
    return reports


if __name__ == "__main__":
    asyncio.run(main(ChatRagcache(temperature=0, max_tokens=24)))
