"""`RagcachePromptCachingMiddleware` in agents of LangChain: what the model gets."""

from __future__ import annotations

import copy
import subprocess
import sys
from hashlib import sha256

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain.agents.middleware.types import omit_payload
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_ragcache.markers import marked_system
from langchain_ragcache.middleware import RagcachePromptCachingMiddleware
from recording import (
    DICT_TOOL,
    SYSTEM,
    TOOLS,
    WEATHER,
    Recording,
    agent_of,
    archive,
    ask,
    markers,
    model,
    names,
    told,
    weather,
)

__all__ = ["model", "told"]

FIVE_MINUTES = {"type": "ephemeral", "ttl": "5m"}


class TestMarkers:
    def test_the_last_system_block_and_the_last_tool_are_marked(self, model):
        ask(agent_of(model))
        [call] = model.calls
        assert markers(call) == ([None, FIVE_MINUTES], [FIVE_MINUTES])
        assert call["messages"][0]["content"][0]["text"] == SYSTEM

    @pytest.mark.parametrize("ttl", ["5m", "30m", "1h", "12h"])
    def test_markers_ask_for_the_lifetime_that_was_given(self, model, ttl):
        ask(agent_of(model, RagcachePromptCachingMiddleware(ttl=ttl)))
        [call] = model.calls
        marker = {"type": "ephemeral", "ttl": ttl}
        assert markers(call) == ([None, marker], [marker])

    def test_other_lifetimes_are_refused(self):
        with pytest.raises(ValueError, match="5m, 30m, 1h, 12h, not '2h'"):
            RagcachePromptCachingMiddleware(ttl="2h")

    def test_of_several_system_blocks_only_the_last_is_marked(self, model):
        blocks = ["Be brief.", {"type": "text", "text": "Be kind."}]
        ask(agent_of(model, system_prompt=SystemMessage(blocks)))
        brief, kind = model.calls[0]["messages"][0]["content"]
        assert brief == {"type": "text", "text": "Be brief."}
        assert kind == {"type": "text", "text": "Be kind.", "cache_control": FIVE_MINUTES}

    def test_the_system_message_keeps_its_other_fields(self):
        message = SystemMessage("Be kind.", id="s", name="rules", additional_kwargs={"x": 1})
        marked = marked_system(message, FIVE_MINUTES)
        assert marked.model_copy(update={"content": "Be kind."}) == message

    def test_a_last_block_that_is_a_string_keeps_its_text(self, model):
        ask(agent_of(model, system_prompt=SystemMessage(["Be brief.", "Be kind."])))
        brief, kind = model.calls[0]["messages"][0]["content"]
        assert brief == {"type": "text", "text": "Be brief."}
        assert kind == {"type": "text", "text": "Be kind.", "cache_control": FIVE_MINUTES}

    @pytest.mark.parametrize("place", ["block", "extras"])
    def test_a_marker_of_the_user_stays(self, model, place):
        own = {"cache_control": {"type": "ephemeral", "ttl": "12h"}}
        block = {"type": "text", "text": "Be kind."} | (
            own if place == "block" else {"extras": own}
        )
        mine = weather.model_copy(update={"extras": own}) if place == "extras" else DICT_TOOL | own
        ask(agent_of(model, tools=[mine], system_prompt=SystemMessage([block])))
        assert markers(model.calls[0]) == ([own["cache_control"]], [own["cache_control"]])

    @pytest.mark.parametrize("system", [None, SystemMessage(""), SystemMessage([])])
    def test_without_system_text_only_the_tools_are_marked(self, model, system):
        ask(agent_of(model, system_prompt=system))
        [call] = model.calls
        assert names(call) == ["archive", "weather"]
        assert call["tools"][-1]["cache_control"] == FIVE_MINUTES
        assert "cache_control" not in str(call["messages"])

    def test_without_tools_only_the_system_message_is_marked(self, model):
        ask(agent_of(model, tools=[]))
        [call] = model.calls
        assert not call.get("tools")
        assert call["messages"][0]["content"][-1]["cache_control"] == FIVE_MINUTES

    def test_a_tool_that_is_a_dictionary_is_marked_too(self, model):
        tools = [archive, copy.deepcopy(DICT_TOOL)]
        ask(agent_of(model, tools=tools))
        assert model.calls[0]["tools"][-1] == {**DICT_TOOL, "cache_control": FIVE_MINUTES}
        assert tools == [archive, DICT_TOOL]

    def test_markers_wait_for_enough_messages_but_the_order_of_tools_does_not(self, model):
        model.script = [AIMessage("", tool_calls=[WEATHER])]
        ask(agent_of(model, RagcachePromptCachingMiddleware(min_messages_to_cache=4)))
        first, second = model.calls
        assert markers(first) == ([None, None], [])
        assert markers(second) == ([None, FIVE_MINUTES], [FIVE_MINUTES])
        assert names(first) == names(second) == ["archive", "weather"]


def test_tools_are_sorted_by_name_whatever_their_form_and_order():
    orders = []
    for tools in ([weather, DICT_TOOL, archive], [DICT_TOOL, archive, weather]):
        model = Recording(stable_tool_order=False)
        ask(agent_of(model, tools=tools))
        orders.append(model.calls[0]["tools"])
    assert orders[0] == orders[1]
    assert names({"tools": orders[0]}) == ["archive", "map", "weather"]


def request_of(model, **fields):
    return ModelRequest(
        **{
            "model": model,
            "messages": [HumanMessage("Hello?")],
            "system_message": SystemMessage([{"type": "text", "text": SYSTEM}]),
            "tools": [weather, archive, copy.deepcopy(DICT_TOOL)],
            "model_settings": {"seed": 1},
            **fields,
        }
    )


def test_nothing_is_changed_in_place(model):
    request = request_of(model)
    before = copy.deepcopy((request.system_message, request.tools, request.model_settings))
    tools = list(request.tools)
    RagcachePromptCachingMiddleware(prompt_cache_key="k").wrap_model_call(
        request, lambda prepared: AIMessage(str(prepared is request))
    )
    assert (request.system_message, request.tools, request.model_settings) == before
    assert all(one is other for one, other in zip(request.tools, tools, strict=True))
    assert weather.extras is None


async def test_async_calls_get_the_same_request(model):
    middleware = RagcachePromptCachingMiddleware()
    prepared = []

    async def handler(request):
        prepared.append(request)
        return AIMessage("async")

    answer = await middleware.awrap_model_call(request_of(model), handler)
    assert answer.content == "async"
    middleware.wrap_model_call(request_of(model), prepared.append)
    assert prepared[0] == prepared[1]
    assert prepared[0].model_settings == {"seed": 1}
    assert prepared[0].tools[-1].extras == {"cache_control": FIVE_MINUTES}


async def test_an_agent_may_run_async(model):
    agent = agent_of(model)
    await agent.ainvoke({"messages": "Hi"}, {"configurable": {"thread_id": "t"}})
    [call] = model.calls
    assert call["prompt_cache_key"] == "t"
    assert markers(call) == ([None, FIVE_MINUTES], [FIVE_MINUTES])


class TestPromptCacheKey:
    def test_it_is_the_thread(self, model):
        agent = agent_of(model)
        ask(agent, thread="t-1")
        ask(agent, thread=2)
        assert [call["prompt_cache_key"] for call in model.calls] == ["t-1", "2"]

    def test_it_is_a_hash_of_a_thread_with_a_long_id(self, model):
        agent = agent_of(model)
        longest, longer, other = ("x" * 1024, "x" * 1025, "y" * 1025)
        for thread in (longest, longer, longer, other):
            ask(agent, thread=thread)
        keys = [call["prompt_cache_key"] for call in model.calls]
        assert keys[0] == longest
        assert keys[1] == keys[2] == sha256(longer.encode()).hexdigest() != keys[3]

    def test_the_gateway_takes_that_of_any_thread(self, chat):
        agent = create_agent(
            chat(max_tokens=20), TOOLS, middleware=[RagcachePromptCachingMiddleware()]
        )
        assert ask(agent, thread="x" * 5000)["messages"][-1].text

    def test_there_is_none_without_a_thread(self, model):
        ask(agent_of(model))
        assert "prompt_cache_key" not in model.calls[0]

    def test_the_argument_comes_before_the_thread(self, model):
        ask(agent_of(model, RagcachePromptCachingMiddleware(prompt_cache_key="mine")), thread="t")
        assert model.calls[0]["prompt_cache_key"] == "mine"

    @pytest.mark.parametrize("where", ["settings", "binding", "model", "body"])
    def test_the_users_own_comes_first(self, where):
        own = {"prompt_cache_key": "own"}
        fields = {"model": own, "body": {"extra_body": own}}
        model = Recording(**fields.get(where, {}))
        bound = model.bind(**own) if where == "binding" else model
        settings = own if where == "settings" else {}

        @wrap_model_call
        def set_key(request, handler):
            return handler(request.override(model_settings=settings))

        ours = RagcachePromptCachingMiddleware(prompt_cache_key="ours")
        ask(agent_of(bound, set_key, ours), thread="t")
        assert model.calls[0]["prompt_cache_key"] == "own"

    def test_other_settings_stay(self, model):
        @wrap_model_call
        def set_seed(request, handler):
            return handler(request.override(model_settings={"seed": 7}))

        ask(agent_of(model, set_seed, RagcachePromptCachingMiddleware()), thread="t")
        assert (model.calls[0]["seed"], model.calls[0]["prompt_cache_key"]) == (7, "t")


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_a_bound_model_is_prepared_like_a_plain_one(model, tools):
    ask(agent_of(model.bind(seed=3).with_config(tags=["x"]), tools=tools), thread="t")
    [call] = model.calls
    assert call["prompt_cache_key"] == "t"
    assert call["messages"][0]["content"][-1]["cache_control"] == FIVE_MINUTES


class TestOtherModels:
    @pytest.fixture
    def other(self):
        class Other(GenericFakeChatModel):
            def bind_tools(self, tools, **kwargs):
                assert [tool.name for tool in tools] == ["weather", "archive"]
                assert not any(tool.extras for tool in tools)
                assert not kwargs.get("prompt_cache_key")
                return self

        return Other(messages=iter([AIMessage("Done.")]))

    def test_they_are_called_as_they_are_with_a_warning(self, other, told):
        assert ask(agent_of(other), thread="t")["messages"][-1].content == "Done."
        [text] = told()
        assert text == "RagcachePromptCachingMiddleware is for ChatRagcache models, not for Other"

    def test_or_without_one(self, other, told):
        middleware = RagcachePromptCachingMiddleware(unsupported_model_behavior="ignore")
        assert ask(agent_of(other, middleware))["messages"][-1].content == "Done."
        assert told() == []

    def test_or_refused(self, other):
        middleware = RagcachePromptCachingMiddleware(unsupported_model_behavior="raise")
        with pytest.raises(ValueError, match="not for Other"):
            ask(agent_of(other, middleware))


def test_traces_of_the_middleware_leave_out_the_conversation():
    assert RagcachePromptCachingMiddleware.trace_policy.process_inputs is omit_payload


def test_the_gateway_keeps_what_is_marked(chat, gateway):
    def retained(*middleware):
        agent = create_agent(model, TOOLS, system_prompt=SYSTEM * 8, middleware=middleware)
        assert ask(agent, "t")["messages"][-1].usage_metadata["input_tokens"] > 100
        return gateway.at_rest().retained

    model = chat(temperature=0, max_tokens=20)
    assert retained() == 0
    assert retained(RagcachePromptCachingMiddleware(ttl="1h")) > 5


def test_without_langchain_the_error_names_the_command():
    code = (
        "import sys; sys.modules['langchain'] = None; sys.modules['langchain.agents'] = None\n"
        "import langchain_ragcache.middleware"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("which is not installed: pip install langchain")
