"""What the middleware tells about prompts whose system text or tools change between turns."""

from __future__ import annotations

import warnings

import pytest
from langchain.agents.middleware import dynamic_prompt, wrap_model_call
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage
from langchain_ragcache import middleware
from langchain_ragcache.middleware import RagcachePromptCachingMiddleware
from langchain_ragcache.prompt_changes import PromptChangedWarning
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel
from recording import WEATHER, agent_of, archive, ask, model, names, told, weather

__all__ = ["model", "told"]


def prompts(*texts):
    """Middleware that gives every call the next of these system prompts."""
    texts = list(texts)
    return dynamic_prompt(lambda request: texts.pop(0))


def systems(model):
    return [call["messages"][0]["content"][0]["text"] for call in model.calls]


def test_a_clock_in_the_system_prompt_is_told_once_a_thread(model, told):
    clock = prompts(*(f"Now 10:15:0{i}." for i in range(5)))
    agent = agent_of(model, clock, RagcachePromptCachingMiddleware())
    for thread in "tttuu":
        ask(agent, thread)
    assert told() == [
        f"the prompt of thread {thread!r} is not that of its last turn, and is computed anew "
        f"from where it differs: system: from character 11 on, {before!r} became {after!r}"
        for thread, before, after in [
            ("t", "Now 10:15:00.", "Now 10:15:01."),
            ("u", "Now 10:15:03.", "Now 10:15:04."),
        ]
    ]


def test_it_is_a_warning_of_its_own(model):
    agent = agent_of(model, prompts("one", "two"), RagcachePromptCachingMiddleware())
    ask(agent, "t")
    with pytest.warns(PromptChangedWarning, match="system: from character 0 on"):
        ask(agent, "t")


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_it_can_be_filtered_by_the_name_of_the_module(model, asynchronous):
    agent = agent_of(model, prompts("one", "two", "three"), RagcachePromptCachingMiddleware())

    async def turn(thread):
        config = {"configurable": {"thread_id": thread}}
        state = {"messages": "Hi"}
        await agent.ainvoke(state, config) if asynchronous else agent.invoke(state, config)

    await turn("t")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await turn("t")
    assert [one.filename for one in caught] == [middleware.__file__]


def test_middleware_behind_it_is_not_seen(model, told):
    agent = agent_of(model, RagcachePromptCachingMiddleware(), prompts("one", "two"))
    ask(agent, "t")
    ask(agent, "t")
    assert [call["messages"][0]["content"] for call in model.calls] == ["one", "two"]
    assert told() == []


def test_equal_turns_have_nothing_to_tell(model, told):
    model.script = [AIMessage("", tool_calls=[WEATHER])]
    agent = agent_of(model)
    ask(agent, "t")
    ask(agent, "t", "And now?")
    assert len(model.calls) == 3
    assert told() == []


def test_it_can_be_switched_off(model, told):
    middleware = RagcachePromptCachingMiddleware(lint=False)
    agent = agent_of(model, prompts("one", "two"), middleware)
    ask(agent, "t")
    ask(agent, "t")
    assert told() == []


def test_runs_without_a_thread_are_not_compared(model, told):
    agent = agent_of(model, prompts("one", "two"), RagcachePromptCachingMiddleware())
    ask(agent)
    ask(agent)
    assert told() == []


def test_tools_that_come_and_go_within_a_turn_are_named(model, told):
    model.script = [AIMessage("", tool_calls=[WEATHER])]

    @wrap_model_call
    def only_weather_first(request, handler):
        first = len(request.messages) == 1
        return handler(request.override(tools=[weather] if first else request.tools))

    ask(agent_of(model, only_weather_first, RagcachePromptCachingMiddleware()), "t")
    [text] = told()
    assert text.endswith(": tools added: archive")


def test_a_tool_whose_description_changes_is_named(model, told):
    def agent(description):
        changed = weather.model_copy(update={"description": description})
        return agent_of(model, middleware, tools=[changed, archive])

    middleware = RagcachePromptCachingMiddleware()
    ask(agent("As of Monday."), "t")
    ask(agent("As of Tuesday."), "t")
    [text] = told()
    assert "tool weather: description: from character 7 on" in text


def test_order_and_markers_of_tools_are_no_change(model, told):
    middleware = RagcachePromptCachingMiddleware(min_messages_to_cache=4)
    model.script = [AIMessage("", tool_calls=[WEATHER])]
    ask(agent_of(model, middleware, tools=[weather, archive]), "t")
    ask(agent_of(model, middleware, tools=[archive, weather]), "t")
    assert told() == []


def test_an_answers_schema_that_is_sent_as_a_tool_is_one(model, told):
    class Verdict(BaseModel):
        """What came out."""

        text: str

    verdict = {"name": "Verdict", "args": {"text": "x"}, "id": "c2", "type": "tool_call"}
    model.script = [AIMessage("", tool_calls=[WEATHER]), AIMessage("", tool_calls=[verdict])]

    @wrap_model_call
    def schema_last(request, handler):
        first = len(request.messages) == 1
        return handler(request.override(response_format=None) if first else request)

    middleware = RagcachePromptCachingMiddleware()
    answers = ToolStrategy(Verdict)
    ask(agent_of(model, schema_last, middleware, response_format=answers), "t")
    assert names(model.calls[1]) == ["Verdict", "archive", "weather"]
    [text] = told()
    assert text.endswith(": tools added: Verdict")


def test_nodes_of_a_thread_are_told_apart(model, told):
    middleware = RagcachePromptCachingMiddleware()
    one, two = (agent_of(model, middleware, system_prompt=f"You are {i}.") for i in (1, 2))
    graph = StateGraph(MessagesState).add_node("one", one).add_node("two", two)
    agents = graph.add_edge(START, "one").add_edge("one", "two").compile()
    ask(agents, "t")
    ask(agents, "t")
    assert systems(model) == ["You are 1.", "You are 2."] * 2
    assert told() == []


def test_agents_with_names_are_told_apart(model, told):
    middleware = RagcachePromptCachingMiddleware()
    for name in ("one", "two"):
        ask(agent_of(model, middleware, name=name, system_prompt=f"You are {name}."), "t")
    assert systems(model) == ["You are one.", "You are two."]
    assert told() == []
