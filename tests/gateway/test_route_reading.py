"""What a router reads in requests, with the real tokenizer."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from ragcache.gateway.route import reading
from ragcache.gateway.route.reading import read_request
from ragcache.prompt.tokenize import TokenizerPool
from ragcache.routing import load_encode
from ragcache.types import ChatPrompt, Message

TURNS = [
    {"role": "system", "content": "You keep a lighthouse."},
    {"role": "user", "content": "Who are you?"},
]


@pytest.fixture(scope="module")
def encode():
    return load_encode(None)


async def read(body, encode, path="/v1/chat/completions", headers=(), tenant=""):
    return await read_request(path, dict(headers), json.dumps(body).encode(), tenant, encode)


async def test_prompts_become_the_tokens_that_a_replica_finds(encode, smollm2):
    asked = await read({"model": "m", "messages": TURNS}, encode)
    prompt = ChatPrompt(tuple(Message(**turn) for turn in TURNS))
    expected = TokenizerPool(smollm2).prompts.encode_chat(prompt).token_ids
    assert [*asked.prompts[0]] == expected
    assert (asked.model, asked.salt) == ("m", None)


async def test_both_wires_read_alike(encode):
    chat = await read({"model": "m", "messages": TURNS, "cache_salt": "s"}, encode)
    body = {
        "model": "m",
        "max_tokens": 5,
        "system": TURNS[0]["content"],
        "messages": TURNS[1:],
        "cache_salt": "s",
    }
    message = await read(body, encode, "/v1/messages")
    assert [*message.prompts[0]] == [*chat.prompts[0]]
    assert message.salt == chat.salt == "s"


async def test_texts_and_token_ids_are_prompts_too(encode):
    body = {"model": "m", "prompt": [[1, 2, 3], [4]]}
    found = (await read(body, encode, "/v1/completions")).prompts
    assert [[*prompt] for prompt in found] == [[1, 2, 3], [4]]
    text = await read({"model": "m", "prompt": "a light"}, encode, "/v1/completions")
    assert len(text.prompts[0]) == 2


async def test_an_echo_reads_no_cache(encode):
    body = {"model": "m", "prompt": "a light", "echo": True, "logprobs": 1}
    assert (await read(body, encode, "/v1/completions")).prompts == ()


async def test_nothing_is_known_of_what_is_no_object(encode):
    asked = await read([], encode)
    assert (asked.session, asked.prompts, asked.model) == (None, (), None)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m"},
        {"model": "m", "messages": []},
        {"model": "m", "messages": [{"role": "nobody", "content": "x"}]},
        {"model": "m", "messages": TURNS, "temperature": 9},
    ],
)
async def test_model_and_conversation_are_known_where_the_prompt_is_not(encode, body):
    asked = await read(body, encode)
    assert (asked.prompts, asked.model) == ((), "m")
    assert asked.session


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**63])
async def test_ids_that_no_token_has_are_no_prompt(encode, token):
    body = {"model": "m", "prompt": [1, token]}
    asked = await read(body, encode, "/v1/completions")
    assert (asked.prompts, asked.model) == ((), "m")


async def test_a_prompt_that_takes_too_long_is_not_waited_for(monkeypatch):
    async def forever(*_: object) -> list[int]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(reading, "PATIENCE", 0.01)
    async with asyncio.timeout(10):
        asked = await read({"model": "m", "messages": TURNS}, forever)
    assert (asked.prompts, asked.model) == ((), "m")


async def test_a_huge_body_is_not_encoded(encode, monkeypatch):
    body = {"model": "m", "messages": TURNS}
    monkeypatch.setattr(reading, "LARGEST", len(json.dumps(body)))
    assert (await read(body, encode)).prompts
    monkeypatch.setattr(reading, "LARGEST", len(json.dumps(body)) - 1)
    assert (await read(body, encode)).prompts == ()


async def test_conversations_are_of_a_tenant(encode):
    body = {"model": "m", "messages": TURNS}
    first = await read(body, encode, headers={"x-session-id": "s"}, tenant="a")
    other = await read(body, encode, headers={"x-session-id": "s"}, tenant="b")
    assert first.session != other.session
    assert first.session != "s"
    again = await read({**body, "user": "u"}, encode, headers={"x-session-id": "s"}, tenant="a")
    assert again.session == first.session


async def test_without_an_encoder_there_is_a_conversation_and_no_prompt():
    asked = await read({"model": "m", "messages": TURNS}, None)
    assert asked.session
    assert asked.model == "m"
    assert asked.prompts == ()


def test_a_router_needs_no_torch(smollm2):
    code = """
import asyncio, sys
sys.modules["torch"] = None  # as if it were not installed
import ragcache.gateway.route.app
from ragcache.routing import load_encode
print(len(asyncio.run(load_encode(None)("a light", ""))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr
