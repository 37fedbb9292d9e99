"""A large body costs the other requests nothing: few errors, and no work on the event loop."""

import json
import threading

import pytest
from pydantic import ValidationError

from ragcache.gateway.anthropic.schema import MessagesRequest, PromptFields
from ragcache.gateway.openai.schema import ChatCompletionRequest, CompletionRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hi"}
SCHEMAS = {
    CHAT: ChatCompletionRequest,
    TEXT: CompletionRequest,
    MESSAGES: MessagesRequest,
    COUNT: PromptFields,
}


def said(content, role="user"):
    return {"messages": [{"role": role, "content": content}]}


def document(content):
    return {"type": "document", "source": {"type": "content", "content": content}}


def openai_lists(items):
    """Every list of a chat, filled with `items`."""
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": items}}
    return {
        "messages": {"messages": items},
        "content": said(items),
        "tool_calls": {"messages": [{**USER, "role": "assistant", "tool_calls": items}]},
        "tools": {"tools": items},
        "allowed_tools": {"tool_choice": allowed},
        "stop": {"stop": items},
        "stop_token_ids": {"stop_token_ids": items},
        "logit_bias": {"logit_bias": {f"x{i}": item for i, item in enumerate(items)}},
    }


def anthropic_lists(items):
    """Every list of a message, filled with `items`."""
    passage = {"type": "search_result", "source": "s", "title": "t", "content": items}
    result = {"type": "tool_result", "tool_use_id": "c", "content": items}
    return {
        "messages": {"messages": items},
        "content": said(items),
        "assistant": said(items, "assistant"),
        "instructions": said(items, "system"),
        "document": said([document(items)]),
        "search_result": said([passage]),
        "tool_result": said([result]),
        "passage in a result": said([{**result, "content": [document(items)]}]),
        "system": {"system": items},
        "tools": {"tools": items},
        "stop_sequences": {"stop_sequences": items},
    }


def texts_lists(items):
    """Every list of a completion, filled with `items`."""
    return {"prompt": {"prompt": items}}


LISTS = {CHAT: openai_lists, TEXT: texts_lists, MESSAGES: anthropic_lists, COUNT: anthropic_lists}
PLACES = [
    (path, name)
    for path, lists in LISTS.items()
    for name in lists([])
    if (path, name) != (COUNT, "stop_sequences")
]


def body(path, name, items):
    """A request that is good but for its list `name`."""
    return {"model": "tiny", "max_tokens": 9, "messages": [USER], **LISTS[path](items)[name]}


def error_count(path, body):
    with pytest.raises(ValidationError) as caught:
        SCHEMAS[path].model_validate_json(json.dumps(body))
    return caught.value.error_count()


@pytest.mark.parametrize(("path", "name"), PLACES)
async def test_a_list_of_very_many_is_one_error(http, path, name):
    many = body(path, name, [[]] * 30_000)
    assert error_count(path, many) == 1
    async with http.post(path, json=many) as response:
        assert response.status == 400
    async with http.get("/health") as response:
        assert response.status == 200


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_a_list_ends_at_its_first_bad_item(path, name):
    most = 4 if name == "stop" else 16
    assert error_count(path, body(path, name, [[]] * most)) == 1


TEXT_PART = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("name", "item", "most"),
    [("messages", USER, 10_000), ("content", TEXT_PART, 4096), ("document", TEXT_PART, 4096)],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, COUNT])
def test_conversations_may_be_long_but_not_endless(path, name, item, most):
    if (path, name) != (CHAT, "document"):
        SCHEMAS[path].model_validate_json(json.dumps(body(path, name, [item] * most)))
        assert error_count(path, body(path, name, [item] * (most + 1))) == 1


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_there_are_as_many_tools_as_on_openais_wire(path):
    tools = [{"name": f"f{i}", "input_schema": {"type": "object"}} for i in range(129)]
    SCHEMAS[path].model_validate_json(json.dumps(body(path, "tools", tools[:128])))
    assert error_count(path, body(path, "tools", tools)) == 1


@pytest.mark.parametrize(
    ("path", "schema", "work"),
    [
        (CHAT, ChatCompletionRequest, "requests"),
        (TEXT, CompletionRequest, "requests"),
        (MESSAGES, MessagesRequest, "request"),
        (COUNT, PromptFields, "prompt"),
    ],
)
async def test_no_large_body_is_parsed_or_converted_on_the_event_loop(
    http, monkeypatch, path, schema, work
):
    on_loop, converted = [], getattr(schema, work)
    checked = schema.model_validate_json.__func__

    def here():
        on_loop.append(threading.current_thread() is threading.main_thread())

    def check(cls, raw):
        here()
        return checked(cls, raw)

    def convert(self, *args):
        here()
        return converted(self, *args)

    monkeypatch.setattr(schema, "model_validate_json", classmethod(check))
    monkeypatch.setattr(schema, work, convert)
    fields = {"prompt": "x" * 40_000} if path == TEXT else said("x" * 40_000)
    async with http.post(path, json={"model": "tiny", "max_tokens": 9, **fields}) as response:
        assert response.status == 200
    assert on_loop == [False, False]
