"""`response_format`: what reaches the serving, and the client's own parsing of the answer."""

import asyncio

import pytest
from openai import LengthFinishReasonError, OpenAI
from pydantic import BaseModel

from ragcache.types import Delta, FinishReason

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "who is it"}]}
SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {}}}


class Person(BaseModel):
    name: str
    age: int | None


def json_schema(**fields):
    return {"type": "json_schema", "json_schema": {"name": "person", **fields}}


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        (json_schema(schema=SCHEMA), SCHEMA),
        (json_schema(schema=SCHEMA, strict=True, description="a person"), SCHEMA),
        (json_schema(schema=SCHEMA, strict=None), SCHEMA),
        (json_schema(schema={}), {}),
        (json_schema(), {"type": "object"}),
    ],
)
async def test_every_format_becomes_a_schema_and_no_other_prompt(client, serving, wanted, schema):
    for options in ({}, {"response_format": wanted}):
        await client.chat.completions.create(**ASK, **options)
    plain, formatted = [generation.request for generation in serving.generations]
    assert plain.output.schema is None
    assert formatted.output.schema == schema
    assert formatted.prompt == plain.prompt


async def test_a_format_may_stand_beside_tools(client, serving):
    tools = [{"type": "function", "function": {"name": "f"}}]
    await client.chat.completions.create(
        **ASK, tools=tools, response_format={"type": "json_object"}
    )
    rules = serving.generations[0].request.output
    assert (rules.tool_choice, rules.schema) == ("auto", {"type": "object"})


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ("json_object", "response_format"),
        ({}, "response_format.type"),
        ({"type": "grammar"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format"),
        ({"type": "json_object", "json_schema": {"name": "x"}}, "response_format"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.name"),
        (json_schema(name="no spaces"), "response_format.json_schema.name"),
        (json_schema(schema=[]), "response_format.json_schema.schema"),
        (json_schema(strict="yes"), "response_format.json_schema.strict"),
    ],
)
async def test_a_malformed_format_is_named(http, wanted, param):
    body = {**ASK, "response_format": wanted}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_the_clients_helpers_parse_the_answer(client, serving):
    serving.script.pieces = ('{"name": "Ada", ', '"age": null}')
    parsed = await client.chat.completions.parse(**ASK, response_format=Person)
    assert parsed.choices[0].message.parsed == Person(name="Ada", age=None)
    async with client.chat.completions.stream(**ASK, response_format=Person) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == Person(name="Ada", age=None)
    schema = serving.generations[-1].request.output.schema
    assert list(schema["properties"]) == ["name", "age"]


async def test_the_synchronous_helper_does_too(url, serving):
    serving.script.pieces = ('{"name": "Ada", "age": 36}',)

    def ask():
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return client.chat.completions.parse(**ASK, response_format=Person)

    completion = await asyncio.to_thread(ask)
    assert completion.choices[0].message.parsed == Person(name="Ada", age=36)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CONTEXT])
async def test_an_answer_cut_off_is_no_answer(client, serving, reason):
    serving.script.deltas = (Delta(0, '{"name": "A'), Delta(0, finish_reason=reason))
    with pytest.raises(LengthFinishReasonError):
        await client.chat.completions.parse(**ASK, response_format=Person)
