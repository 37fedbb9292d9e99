"""What a chat model is told: options of a call, of the environment, and what stays secret."""

import copy
import gc
import pickle
import weakref

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ModelAuthenticationError, ModelTimeoutError
from langchain_core.globals import set_llm_cache
from langchain_core.runnables import RunnableLambda
from langchain_ragcache import ChatRagcache, shutdown
from langchain_ragcache.gateways import current_place
from pydantic import ValidationError

from ragcache.embedded import EmbeddedGateway

QUESTION = "What of it?"


@pytest.fixture(scope="module")
def guarded(make_gateway):
    with make_gateway(api_keys=["right", "other"]) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("option", "near"),
    [("max_token", "max_tokens"), ("temprature", "temperature"), ("time_out", "timeout")],
)
def test_an_unknown_option_of_a_call_is_refused(model, option, near):
    with pytest.raises(ValueError, match=rf"{option}: .*did you mean {near}\?"):
        model.invoke(QUESTION, **{option: 3})
    with pytest.raises(ValueError, match=option):
        next(model.bind(**{option: 3}).stream(QUESTION))


def test_options_of_the_client_can_be_given_to_one_call(guarded, endless):
    model = ChatRagcache(base_url=guarded.url, api_key="wrong")
    with pytest.raises(ModelAuthenticationError):
        model.invoke(QUESTION)
    assert model.invoke(QUESTION, api_key="right").text == guarded.script.text
    header = {"Authorization": "Bearer other"}
    assert model.invoke(QUESTION, default_headers=header).text == guarded.script.text
    with pytest.raises(ModelTimeoutError):
        endless.invoke(QUESTION, timeout=0.2)


def test_copies_may_be_told_secrets_as_strings(guarded):
    model = ChatRagcache(base_url=guarded.url, cache_salt="a")
    copied = model.model_copy(update={"api_key": "right", "cache_salt": "b"})
    assert copied.invoke(QUESTION).text == guarded.script.text
    assert copied.invoke(QUESTION, cache_salt="c").text == guarded.script.text


def test_aliases_hold_in_calls_too(model):
    message = model.invoke(QUESTION, model_name="alias", stop_sequences=["said"])
    assert message.response_metadata["model_name"] == "alias"
    assert message.text == "It is "


def test_an_engine_that_is_given_wins_over_the_environment(gateway, monkeypatch):
    monkeypatch.setenv("RAGCACHE_BASE_URL", "http://127.0.0.1:9")
    given = ChatRagcache(engine=EmbeddedGateway(gateway.serving))
    assert given.invoke(QUESTION).text == gateway.script.text
    assert ChatRagcache(engine_options={"block_size": 8}).base_url is None
    assert ChatRagcache(base_url=None).base_url is None
    assert ChatRagcache().base_url == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"base_url": "http://127.0.0.1:9", "engine_options": {"block_size": 8}}, "base_url"),
        ({"base_url": "http://user:secret@127.0.0.1"}, "base_url"),
        ({"base_url": "127.0.0.1:8000"}, "base_url"),
        ({"default_headers": {"X-One": "a\r\nX-Two: b"}}, "default_headers"),
        ({"api_key": "a\nb"}, "api_key"),
        ({"engine_options": {"model": "x"}}, "engine_options"),
        ({"max_token": 3}, "max_token"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, named):
    with pytest.raises(ValidationError, match=named) as refused:
        ChatRagcache(**options)
    assert named in str(refused.value)


def test_secrets_are_not_shown(gateway):
    model = ChatRagcache(
        base_url=gateway.url,
        api_key="sk-one",
        cache_salt="sk-two",
        default_headers={"X-Key": "sk-three"},
    )
    assert "sk-" not in repr(model)
    assert "sk-" not in str(model._get_invocation_params())
    assert model.invoke(QUESTION).text == gateway.script.text


def test_langchains_cache_tells_tenants_and_salts_apart(gateway):
    set_llm_cache(InMemoryCache())
    try:
        for options in ({"cache_salt": "a"}, {"cache_salt": "b"}, {"api_key": "c"}):
            gateway.script.text = f"An answer for {options}."
            model = ChatRagcache(base_url=gateway.url, **options)
            for _ in range(2):
                assert model.invoke(QUESTION).text == gateway.script.text
    finally:
        set_llm_cache(None)


def test_callers_with_different_headers_share_connections(gateway):
    def ask(number):
        header = {"X-Request-Id": f"request-{number}"}
        ChatRagcache(base_url=gateway.url, default_headers=header).invoke(QUESTION)

    ask(0)
    before = len(current_place()._open)
    for number in range(1, 10):
        ask(number)
    assert len(current_place()._open) == before


def test_a_gateway_that_comes_back_with_another_model(make_gateway, monkeypatch, gateway):
    model = ChatRagcache(base_url=gateway.url)
    assert model.invoke(QUESTION).response_metadata["model_name"] == "tiny"
    monkeypatch.setattr(type(gateway.serving), "model_names", ("new",))
    assert model.invoke(QUESTION).response_metadata["model_name"] == "new"


def test_an_engine_is_shared_by_copies_and_not_pickled(gateway):
    model = ChatRagcache(engine=EmbeddedGateway(gateway.serving), temperature=0)
    assert copy.deepcopy(model).engine is model.engine
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)


def test_the_first_caller_is_not_kept_for_as_long_as_the_engine(gateway, monkeypatch, request):
    class Handler(BaseCallbackHandler):
        pass

    monkeypatch.setattr(EmbeddedGateway, "load", lambda *_, **__: EmbeddedGateway(gateway.serving))
    monkeypatch.setattr(EmbeddedGateway, "close", lambda self: None)
    request.addfinalizer(shutdown)  # before the engine, which is not ours, can be closed again
    handler = Handler()
    model = ChatRagcache(engine_options={"block_size": 16, "max_queue": 77})
    RunnableLambda(lambda question: model.invoke(question)).invoke(
        QUESTION, {"callbacks": [handler]}
    )
    kept = weakref.ref(handler)
    del handler
    gc.collect()
    assert kept() is None


def test_warming_generates_nothing_whatever_the_options_say(chat, engine):
    model = chat(extra_body={"max_completion_tokens": 25, "min_tokens": 5}, stop=["x"])
    usage = model.warm("You answer briefly. " * 20, prompt_cache_key="thread")
    assert usage["output_tokens"] == 0
    assert usage["input_tokens"] > 50
