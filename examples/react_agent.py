"""A ReAct agent: run `make example NAME=react_agent`, or `python examples/react_agent.py`.

A visitor of a museum asks three questions in one conversation. For each, the agent looks something
up and then answers. Every prompt begins with the one before, and is computed only from its end on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Annotated

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_ragcache import CacheReport, ChatRagcache
from langchain_ragcache.middleware import RagcachePromptCachingMiddleware
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import Field
from retrieval import retrieve

SYSTEM = """\
You answer visitors of a museum of lighthouses, tides and bridges. Look up what they ask about
before you answer, and answer from what you have looked up alone."""

QUESTIONS = (
    "Why are the tides of the Bay of Fundy so large?",
    "Tell me about the Eddystone lighthouses.",
    "And what is the Fresnel lens?",
)

ANSWER = {
    "title": "answer",
    "type": "object",
    "properties": {"sentence": {"type": "string", "maxLength": 80}},
    "required": ["sentence"],
}

Query = Annotated[str, Field(max_length=40)]


@tool
def search(query: Query) -> str:
    """Find the passage that says most about the query."""
    return retrieve(query, limit=1)[0].page_content


@tool
def years(query: Query) -> str:
    """List the years in the passages that say most about the query."""
    found = {
        document.metadata["source"]: sorted(set(re.findall(r"\b1\d{3}\b", document.page_content)))
        for document in retrieve(query, limit=3)
    }
    return "\n".join(f"{source}: {', '.join(years)}" for source, years in found.items())


@wrap_model_call
async def look_up_then_answer(
    request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
) -> ModelResponse:
    """Each turn calls a tool and then answers: the embedded model is too small to decide.

    Like the form of the answer, that is enforced token by token, and is nowhere in the prompt.
    """
    looked_up = isinstance(request.messages[-1], ToolMessage)
    # Not request.tool_choice, which agents with a response_format do not pass on.
    settings = {**request.model_settings, "tool_choice": "none" if looked_up else "any"}
    return await handler(request.override(model_settings=settings))


async def main(model: ChatRagcache) -> CacheReport:
    report = CacheReport()
    agent = create_agent(
        model,
        [search, years],
        system_prompt=SYSTEM,
        response_format=ANSWER,
        middleware=[look_up_then_answer, RagcachePromptCachingMiddleware()],
        checkpointer=InMemorySaver(),
    )
    config: RunnableConfig = {
        "configurable": {"thread_id": "visitor"},
        "callbacks": [report],
        "recursion_limit": 10,
    }
    for question in QUESTIONS:
        state = await agent.ainvoke({"messages": [HumanMessage(question)]}, config)
        print(f"{question}\n  {state['structured_response']['sentence']}\n")
    print(report)
    print(
        "\nOnly the first prompt is cold. Every later one computes what is new in it: "
        "a question, or a call and its result."
    )
    return report


if __name__ == "__main__":
    asyncio.run(main(ChatRagcache(temperature=0, max_tokens=96)))
