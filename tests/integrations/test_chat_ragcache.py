"""Options, names, engines, token counts and warming of ChatRagcache."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from graphs import SYSTEM, agent, weather
from langchain_core.exceptions import ModelNotFoundError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_ragcache import ChatRagcache, shutdown
from pydantic import ValidationError

from ragcache.embedded import EmbeddedGateway

BLOCK = 16
QUESTION = "What will I see?"
CALL = '<tool_call>[{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_call>'


# Options.


def test_an_unknown_option_is_named():
    with pytest.raises(ValidationError, match="temprature"):
        ChatRagcache(temprature=1)


@pytest.mark.parametrize("option", [{"timeout": 0}, {"max_retries": -1}, {"max_tokens": "few"}])
def test_a_wrong_option_is_named(option):
    with pytest.raises(ValidationError, match=next(iter(option))):
        ChatRagcache(**option)


def test_a_wrong_option_of_the_engine_is_named():
    model = ChatRagcache(base_url=None, engine_options={"kv_cache_memry": "1GiB"})
    with pytest.raises(ValueError, match="kv_cache_memry"):
        model.invoke(QUESTION)
    with pytest.raises(ValueError, match="kv_cache_memry"):
        model.load()


def test_the_address_comes_from_the_environment(gateway, monkeypatch):
    monkeypatch.setenv("RAGCACHE_BASE_URL", f"{gateway.url}/v1")
    assert ChatRagcache().invoke(QUESTION).text == gateway.script.text
    assert ChatRagcache(base_url=None).base_url is None


def test_what_a_call_says_wins_over_the_options(chat):
    model = chat(max_tokens=3, extra_body={"max_tokens": 4, "min_tokens": 4})
    used = [
        model.invoke(QUESTION).usage_metadata,
        model.invoke(QUESTION, max_tokens=5).usage_metadata,
        model.invoke(QUESTION, max_tokens=5, extra_body={"max_tokens": 6}).usage_metadata,
        model.bind(max_tokens=7).invoke(QUESTION).usage_metadata,
    ]
    assert [usage["output_tokens"] for usage in used] == [4, 5, 6, 7]


def test_stops_of_a_call_replace_those_of_the_model(chat, gateway):
    model = chat(stop=["said"])
    assert model.invoke(QUESTION).text == "It is "
    assert model.invoke(QUESTION, stop=["that"]).text == "It is said "
    assert model.invoke(QUESTION, stop=[]).text == gateway.script.text


def test_headers_and_fields_of_ones_own_are_sent(gateway):
    model = ChatRagcache(base_url=gateway.url, default_headers={"Authorization": "Bearer x"})
    assert model.invoke(QUESTION).text == gateway.script.text
    with pytest.raises(Exception, match="top_k"):
        model.invoke(QUESTION, extra_body={"top_k": "many"})


# Names.


@pytest.mark.parametrize("loaded", [False, True])
def test_the_name_is_that_of_the_gateway_unless_one_is_given(chat, loaded):
    model = chat().load() if loaded else chat()
    assert model.invoke(QUESTION).response_metadata["model_name"] == "tiny"
    assert model.invoke(QUESTION, model="alias").response_metadata["model_name"] == "alias"
    assert chat(model="tiny")._get_ls_params()["ls_model_name"] == "tiny"
    assert model._get_ls_params(model="alias")["ls_model_name"] == "alias"


def test_a_name_that_is_not_served_is_told_with_those_that_are(gateway):
    with pytest.raises(ModelNotFoundError, match=r"'gpt-99' .*tiny, alias"):
        ChatRagcache(base_url=gateway.url, model="gpt-99").load()


def test_the_profile_tells_the_context_once_it_is_known(chat):
    model = chat(profile={"image_inputs": False, "max_output_tokens": 5})
    assert "max_input_tokens" not in model.profile
    assert model.load().profile["max_input_tokens"] == 8192
    assert model.profile["max_output_tokens"] == 5


# Token counts.

HISTORY = [
    SystemMessage(SYSTEM),
    HumanMessage([{"type": "text", "text": "How is"}, {"type": "text", "text": " Oslo?"}]),
    AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Oslo"}, "id": "1"}]),
    ToolMessage("4 degrees", tool_call_id="1"),
    AIMessage("It is cold."),
    HumanMessage("And in 東京? 🗼", name="Ada"),
]


@pytest.mark.parametrize("tools", [[], [weather]], ids=["", "tools"])
def test_counted_tokens_are_those_of_the_call(model, tools):
    counted = model.get_num_tokens_from_messages(HISTORY, tools)
    used = model.bind_tools(tools).invoke(HISTORY).usage_metadata
    assert counted == used["input_tokens"] > 150


def test_tokens_of_a_text_are_those_that_it_adds(model):
    assert model.get_num_tokens("") == 0
    texts = ["word " * 20, "word " * 40]
    one, two = (model.get_num_tokens(text) for text in texts)
    assert (one, two) == (20, 40) or two - one == 20


# Warming.


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_the_first_call_of_an_agent_finds_what_was_warmed(model, gateway, asynchronous):
    gateway.script.rules = [("<tool_call>", CALL)]
    arguments = SystemMessage(SYSTEM), [weather]
    warmed = await model.awarm(*arguments) if asynchronous else model.warm(*arguments)
    assert warmed["output_tokens"] == 0
    assert warmed["input_token_details"]["cache_read"] == 0
    ask = {"messages": [("user", QUESTION)]}
    call = agent(model).invoke(ask, {"recursion_limit": 8})["messages"][1]
    end_of_turn = 5  # tokens behind the empty question that stood for this one
    shared = (warmed["input_tokens"] - end_of_turn) // BLOCK * BLOCK
    assert call.usage_metadata["input_token_details"]["cache_read"] == shared > 250
    assert model.warm(SYSTEM, [weather])["input_token_details"]["cache_read"] >= shared


# Engines in this process.


class Loads:
    """Stands in for loading: every engine is the scripted one."""

    def __init__(self, serving):
        self.serving = serving
        self.asked = []
        self.closed = 0
        self.failures = []

    def __call__(self, model=None, **options):
        self.asked.append((model, options))
        time.sleep(0.05)
        if self.failures:
            raise self.failures.pop()
        loads = self

        class Loaded(EmbeddedGateway):
            def close(self):
                loads.closed += 1

        return Loaded(self.serving)


@pytest.fixture
def loads(gateway, monkeypatch):
    shutdown()
    loads = Loads(gateway.serving)
    monkeypatch.setattr(EmbeddedGateway, "load", loads)
    yield loads
    shutdown()


def test_models_with_the_same_options_share_one_engine(loads):
    options = {"kv_cache_memory": "1GiB", "dtype": "float32"}
    same = [
        ChatRagcache(engine_options=options),
        ChatRagcache(engine_options=dict(reversed(options.items())), temperature=0.5),
        ChatRagcache(engine_options=options).model_copy(),
    ]
    assert loads.asked == []  # until there is something to do
    for model in [*same, *same]:
        assert model.invoke(QUESTION).text
    assert loads.asked == [(None, options)]


def test_models_with_other_options_have_engines_of_their_own(loads):
    models = [
        ChatRagcache(),
        ChatRagcache(engine_options={"dtype": "float32"}),
        ChatRagcache(model="some/model"),
    ]
    for model in [*models, *models]:
        assert model.invoke(QUESTION).response_metadata["model_name"] == "tiny"
    assert loads.asked == [(None, {}), (None, {"dtype": "float32"}), ("some/model", {})]
    shutdown()
    assert loads.closed == 3


def test_first_calls_at_once_load_once(loads):
    model = ChatRagcache()
    start = threading.Barrier(6)

    def use(number):
        start.wait()
        return asyncio.run(model.ainvoke(QUESTION)) if number % 2 else model.invoke(QUESTION)

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(use, range(6)))
    assert len({answer.text for answer in answers}) == 1
    assert len(loads.asked) == 1


def test_a_load_that_failed_is_tried_again(loads):
    loads.failures = [OSError("no such file")]
    model = ChatRagcache()
    with pytest.raises(OSError, match="no such file"):
        model.invoke(QUESTION)
    assert model.invoke(QUESTION).text
    assert len(loads.asked) == 2


def test_who_leaves_while_an_engine_is_loaded_leaves_it_to_others(loads):
    model = ChatRagcache(timeout=0.02)
    with pytest.raises(Exception, match=r"0\.02 seconds"):
        model.invoke(QUESTION)
    assert ChatRagcache().invoke(QUESTION).text
    assert len(loads.asked) == 1


def test_a_shutdown_closes_engines_also_while_they_are_loaded(loads):
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(ChatRagcache().invoke, QUESTION)
        while not loads.asked:
            time.sleep(0.002)
        shutdown()
        assert loads.closed == 1
        assert call.exception(10) is not None


def test_an_engine_that_was_given_stays_open(gateway, loads):
    model = ChatRagcache(engine=EmbeddedGateway(gateway.serving))
    assert model.invoke(QUESTION).text == gateway.script.text
    shutdown()
    assert model.invoke(QUESTION).text == gateway.script.text
    assert loads.asked == []
