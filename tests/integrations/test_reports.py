"""`CacheReport`: every call of a model once, under its own name, with what its prompt cost."""

from __future__ import annotations

from uuid import uuid4

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_ragcache import CacheReport, ReportedStep
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send

PROMPT = "Tell what is known about lighthouses, tides and bridges. " * 8


def graph_of(model):
    def work(state):
        return {"messages": [model.invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("work", work)
    builder.add_edge(START, "work")
    return builder.compile()


def fan_out_of(model, branches):
    async def work(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("work", work)
    builder.add_conditional_edges(START, lambda state: [Send("work", state)] * branches, ["work"])
    return builder.compile()


@pytest.fixture
def report():
    return CacheReport()


def counts(step):
    return step.prompt_tokens, step.reused_tokens, step.computed_tokens


def usage_counts(message):
    usage = message.usage_metadata
    read = usage["input_token_details"]["cache_read"]
    return usage["input_tokens"], read, usage["input_tokens"] - read


def test_a_step_says_what_the_answer_says(model, report):
    answers = [model.invoke(PROMPT, {"callbacks": [report]}) for _ in range(2)]
    assert [counts(step) for step in report.steps] == [usage_counts(each) for each in answers]
    first, second = report.steps
    assert (first.reason, first.reused_tokens) == ("cold", 0)
    assert (second.reason, second.segment) == (None, None)
    assert second.reused_tokens > 0


async def test_every_way_to_call_a_model_is_one_step(model, report):
    config = {"callbacks": [report]}
    model.invoke(PROMPT, config)
    await model.ainvoke(PROMPT, config)
    for _ in model.stream(PROMPT, config):
        pass
    async for _ in model.astream(PROMPT, config):
        pass
    async for _ in model.astream_events(PROMPT, config):
        pass
    model.batch([PROMPT, PROMPT], config)
    cold, *warm = [counts(step) for step in report.steps]
    assert len(warm) == 6
    assert cold[0] == cold[2] > 0
    assert set(warm) == {(cold[0], (cold[0] - 1) // 16 * 16, cold[0] - (cold[0] - 1) // 16 * 16)}


def test_a_report_that_is_given_twice_notes_a_call_once(model, report):
    model.callbacks = [report]
    model.invoke(PROMPT, {"callbacks": [report]})
    assert len(report.steps) == 1


@pytest.mark.parametrize("mode", ["values", "updates", "messages"])
def test_steps_of_a_graph_are_named_by_their_node(model, report, mode):
    config = {"callbacks": [report], "configurable": {"thread_id": 7}}
    for _ in graph_of(model).stream({"messages": PROMPT}, config, stream_mode=mode):
        pass
    [step] = report.steps
    assert (step.name, step.thread) == ("work", "7")


def test_steps_of_an_agent_within_a_graph_are_named_by_both(model, report):
    builder = StateGraph(MessagesState)
    builder.add_node("writer", create_agent(model, []))
    builder.add_edge(START, "writer")
    builder.compile().invoke({"messages": PROMPT}, {"callbacks": [report]})
    assert [step.name for step in report.steps] == ["writer/model"]


def test_outside_of_a_graph_steps_are_named_by_their_run(model, report):
    model.invoke(PROMPT, {"callbacks": [report]})
    model.with_config(run_name="rewrite").invoke(PROMPT, {"callbacks": [report]})
    assert [step.name for step in report.steps] == ["ChatRagcache", "rewrite"]


async def test_parallel_branches_are_told_apart(model, report):
    await fan_out_of(model, 6).ainvoke({"messages": PROMPT}, {"callbacks": [report]})
    assert {step.name for step in report.steps} == {f"work[{number}]" for number in range(6)}
    assert len(report.steps) == 6
    assert sum(step.reused_tokens == 0 for step in report.steps) == 1


def test_a_changed_prompt_is_told_with_its_place(model, report):
    for clock in ("10:15:01", "10:15:02"):
        model.invoke([("system", clock + PROMPT), ("user", "Who?")], {"callbacks": [report]})
    last = report.steps[-1]
    assert (last.reason, last.segment) == ("changed", "system")


def test_calls_that_fail_are_no_steps(model, report):
    with pytest.raises(ContextOverflowError):
        model.invoke(PROMPT * 100, {"callbacks": [report]})
    assert report.steps == []
    assert not report._started


def test_models_that_tell_no_usage_are_no_steps(report):
    FakeListChatModel(responses=["Yes."]).invoke(PROMPT, {"callbacks": [report]})
    assert report.steps == []


async def test_answers_of_langchains_own_cache_are_no_steps(chat, report):
    model = chat(temperature=0, max_tokens=20, cache=InMemoryCache())
    config = {"callbacks": [report]}
    answer = model.invoke(PROMPT, config)
    assert model.invoke(PROMPT, config).id == (await model.ainvoke(PROMPT, config)).id == answer.id
    assert [counts(step) for step in report.steps] == [usage_counts(answer)]
    model.invoke(PROMPT + "Again.", config)
    assert len(report.steps) == 2
    assert not report._started


def test_cached_answers_without_usage_are_no_steps_either(report):
    model = FakeListChatModel(responses=["Yes."], cache=InMemoryCache())
    for _ in range(2):
        assert model.invoke(PROMPT, {"callbacks": [report]}).text == "Yes."
    assert report.steps == []


async def test_warming_can_be_noted_too(model, report):
    report.add("warm", await model.awarm(PROMPT))
    model.invoke([("system", PROMPT), HumanMessage("Who?")], {"callbacks": [report]})
    warm, answer = report.steps
    assert warm == ReportedStep("warm", warm.prompt_tokens, 0)
    assert answer.reused_tokens >= warm.prompt_tokens - 16


def usage(prompt, read):
    details = {"cache_read": read, "cache_creation": 0}
    return {
        "input_tokens": prompt,
        "output_tokens": 1,
        "total_tokens": prompt + 1,
        "input_token_details": details,
    }


def test_the_table_has_a_line_for_each_step_and_the_totals(report):
    report.add("model", usage(1234, 0), {"reason": "cold", "segment": None})
    report.add("model", usage(1300, 1232), {"reason": None, "segment": "messages.3"})
    report.add("work[12]", usage(90, 16), {"reason": "changed", "segment": "system"})
    assert str(report).splitlines() == [
        "step      prompt  reused  computed  missed",
        "model      1,234       0     1,234  cold",
        "model      1,300   1,232        68",
        "work[12]      90      16        74  changed in system",
        "total      2,624   1,248     1,376  47.6% reused",
    ]
    assert (report.prompt_tokens, report.reused_tokens, report.computed_tokens) == (
        2624,
        1248,
        1376,
    )


def test_the_table_names_threads_where_there_are_several(report):
    for thread in ("a", "b"):
        report.add("model", usage(32, 16), thread=thread)
    names = [line.split("  ")[0] for line in str(report).splitlines()]
    assert names == ["step", "a model", "b model", "total"]


def test_an_empty_report_is_a_table_of_nothing(report):
    assert str(report).splitlines()[1:] == ["total       0       0         0  0.0% reused"]


def test_usage_without_details_counts_as_computed(report):
    report.add("model", {"input_tokens": 5, "output_tokens": 1, "total_tokens": 6})
    assert counts(report.steps[0]) == (5, 0, 5)


def test_an_end_without_a_beginning_is_ignored(report, model):
    result = model.generate([[HumanMessage("Hi")]])
    report.on_llm_end(result, run_id=uuid4())
    assert report.steps == []
