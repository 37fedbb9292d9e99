"""Results of parallel tools: the model gets them in the order of its calls."""

from __future__ import annotations

import random
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ragcache.messages import wire_messages
from langchain_ragcache.tool_results import in_call_order
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Send


def call(call_id, name="look_up", **args):
    return {"name": name, "args": args, "id": call_id, "type": "tool_call"}


def calls(*call_ids):
    return AIMessage("", tool_calls=[call(call_id) for call_id in call_ids])


def result(call_id, text="found"):
    return ToolMessage(text, tool_call_id=call_id)


def ids(messages):
    return [message.tool_call_id for message in messages if isinstance(message, ToolMessage)]


def test_results_follow_the_order_of_the_calls():
    messages = [calls("a", "b", "c"), result("c"), result("a"), result("b")]
    assert ids(in_call_order(messages)) == ["a", "b", "c"]


def test_results_of_unknown_calls_come_last_in_their_order():
    messages = [calls("a", "b"), result("z"), result("b"), result("y"), result("a")]
    assert ids(in_call_order(messages)) == ["a", "b", "z", "y"]


def test_repeated_results_stay_in_their_order():
    messages = [calls("a", "b"), result("b", "1"), result("a"), result("b", "2")]
    assert [m.content for m in in_call_order(messages)[1:]] == ["found", "1", "2"]


def test_a_call_id_that_is_there_twice_has_its_first_place():
    messages = [calls("a", "b", "a"), result("b"), result("a")]
    assert ids(in_call_order(messages)) == ["a", "b"]


def test_calls_that_were_no_json_have_results_too():
    broken = {"name": "look_up", "args": "{", "id": "b", "error": None, "type": "invalid_tool_call"}
    turn = AIMessage("", tool_calls=[call("a")], invalid_tool_calls=[broken])
    messages = [turn, result("z"), result("b"), result("a")]
    assert ids(in_call_order(messages)) == ["a", "b", "z"]


def test_each_turn_is_put_in_order_by_its_own_calls():
    first = [calls("a", "b"), result("b"), result("a")]
    second = [calls("b", "a"), result("a"), result("b")]
    assert ids(in_call_order([*first, *second])) == ["a", "b", "b", "a"]


@pytest.mark.parametrize("between", [HumanMessage("wait"), SystemMessage("rule"), AIMessage("so")])
def test_only_results_right_after_their_calls_are_moved(between):
    messages = [calls("a", "b"), between, result("b"), result("a")]
    assert in_call_order(messages) == messages
    messages = [calls("a", "b"), result("a"), between, result("b"), result("a")]
    assert in_call_order(messages) == messages


def test_results_without_any_calls_stay():
    messages = [result("b"), result("a"), HumanMessage("hello")]
    assert in_call_order(messages) == messages


message_lists = st.lists(
    st.one_of(
        st.lists(st.sampled_from("abc"), max_size=3).map(lambda call_ids: calls(*call_ids)),
        st.builds(result, st.sampled_from("abcd"), st.sampled_from("123")),
        st.just(HumanMessage("go on")),
    ),
    max_size=12,
)


@given(message_lists)
def test_the_same_messages_come_back_and_a_second_time_changes_nothing(messages):
    before = [message.model_copy(deep=True) for message in messages]
    ordered = in_call_order(messages)
    assert messages == before
    assert sorted(map(id, ordered)) == sorted(map(id, messages))
    assert in_call_order(ordered) == ordered
    others = [m for m in messages if not isinstance(m, ToolMessage)]
    assert [m for m in ordered if not isinstance(m, ToolMessage)] == others


@pytest.fixture
def gates():
    """What the calls wait for: at first only the last one may end."""
    events = [Event(), Event(), Event()]
    events[2].set()
    return events


def look_up_behind(gates, then=lambda number: None):
    @tool
    def look_up(number: int) -> str:
        """Look something up."""
        assert gates[number].wait(30)
        then(number)
        return f"found {number}"

    return look_up


THREE = [call(f"c{number}", number=number) for number in range(3)]
TURN = AIMessage("", tool_calls=THREE)


def sent_results(messages):
    return [wire["content"] for wire in wire_messages(messages) if wire["role"] == "tool"]


def test_a_node_of_parallel_tools(gates):
    look_up = look_up_behind(gates, then=lambda number: gates[number - 1].set())
    graph = StateGraph(MessagesState).add_node(ToolNode([look_up])).add_edge(START, "tools")
    messages = graph.compile().invoke({"messages": [TURN]})["messages"]
    assert sent_results(messages) == ["found 0", "found 1", "found 2"]


def test_results_collected_in_the_order_in_which_the_tools_end(gates):
    def fan_out(state):
        return [Send("tools", {"messages": [AIMessage("", tool_calls=[one])]}) for one in THREE]

    graph = StateGraph(MessagesState).add_node(ToolNode([look_up_behind(gates)]))
    graph.add_conditional_edges(START, fan_out, ["tools"])
    results = []
    for update in graph.compile().stream({"messages": [TURN]}, stream_mode="updates"):
        results += update["tools"]["messages"]
        gates[2 - len(results)].set()  # the next to end
    assert ids(results) == ["c2", "c1", "c0"]
    assert sent_results([TURN, *results]) == ["found 0", "found 1", "found 2"]


def test_any_order_of_ten_results_is_undone():
    names = [f"c{i}" for i in range(10)]
    shuffled = random.Random(7).sample(names, len(names))
    assert shuffled != names
    assert ids(in_call_order([calls(*names), *map(result, shuffled)])) == names
