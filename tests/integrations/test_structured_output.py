"""`with_structured_output`: what is a schema, and an agent's tools beside it."""

from __future__ import annotations

import json

import pytest
from graphs import SYSTEM, weather
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_ragcache.structured_output import response_format
from pydantic import BaseModel, RootModel

BLOCK = 16
QUESTION = "What will I see in Oslo?"


class Forecast(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


FORECAST = Forecast(city="Oslo", degrees=4)
PROPERTIES = Forecast.model_json_schema()["properties"]
OBJECT = {"type": "object", "properties": PROPERTIES, "required": ["city", "degrees"]}
LIST = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3}
TITLED = {"title": "My cities!", "description": "Where to go.", **LIST}


def called(name, arguments):
    return f"<tool_call>[{json.dumps({'name': name, 'arguments': arguments})}]</tool_call>"


class TestSchemas:
    @pytest.mark.parametrize(
        ("schema", "value"),
        [
            (OBJECT, FORECAST.model_dump()),
            (LIST, ["Oslo", "Rome"]),
            (TITLED, ["Oslo"]),
            ({"title": "Any object", "type": "object"}, {"x": 1}),
            ({"enum": ["yes", "no"]}, "no"),
            ({"title": "Verdict", "const": "yes"}, "yes"),
            ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
            ({"$ref": "#/$defs/F", "$defs": {"F": OBJECT}}, FORECAST.model_dump()),
            (
                {"type": "function", "function": {"name": "f", "parameters": OBJECT}},
                {"city": "x", "degrees": 1},
            ),
            ({"name": "f", "parameters": OBJECT}, {"city": "x", "degrees": 1}),
            ({"name": "f", "input_schema": OBJECT}, {"city": "x", "degrees": 1}),
        ],
        ids=str,
    )
    def test_any_json_schema_is_one(self, model, gateway, schema, value):
        gateway.script.text = json.dumps(value)
        assert model.with_structured_output(schema).invoke(QUESTION) == value

    def test_a_schema_is_enforced_whatever_the_model_wants_to_say(self, model):
        answer = model.with_structured_output(TITLED).invoke(QUESTION)
        assert isinstance(answer, list)
        assert 1 <= len(answer) <= 3

    def test_its_title_is_the_name_and_the_rest_goes_as_it_is(self):
        wire = {"name": "My_cities_", "description": "Where to go.", "schema": LIST}
        assert response_format(TITLED) == {"type": "json_schema", "json_schema": wire}
        assert TITLED["title"] == "My cities!"
        wire = {"name": "answer", "schema": LIST, "strict": True}
        assert response_format(LIST, True) == {"type": "json_schema", "json_schema": wire}

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    @pytest.mark.parametrize("strict", [None, True])
    @pytest.mark.parametrize(
        "schema",
        [
            {"name": "f"},
            {"title": "f"},
            {"name": "f", "schema": OBJECT},
            {},
            7,
            int | None,
            list[int],
        ],
        ids=str,
    )
    def test_what_is_none_is_refused(self, model, method, strict, schema):
        with pytest.raises(ValueError, match=r"^schema: "):
            model.with_structured_output(schema, method=method, strict=strict)


class TestCalls:
    @pytest.mark.parametrize("title", [{}, {"title": "My forecast"}])
    def test_an_object_of_any_name_can_be_called(self, model, gateway, title):
        name = "My_forecast" if title else "answer"
        gateway.script.text = called(name, FORECAST.model_dump())
        structured = model.with_structured_output({**title, **OBJECT}, method="function_calling")
        assert structured.invoke(QUESTION) == FORECAST.model_dump()

    def test_a_schema_without_properties_can_too(self, model, gateway):
        gateway.script.text = called("any", {"x": 1})
        schema = {"title": "any", "type": "object"}
        structured = model.with_structured_output(schema, method="function_calling")
        assert structured.invoke(QUESTION) == {"x": 1}

    @pytest.mark.parametrize(
        "schema", [LIST, TITLED, {"enum": ["a", "b"]}, {"type": "string"}, RootModel[list[int]]]
    )
    def test_what_is_no_object_cannot(self, model, schema):
        with pytest.raises(ValueError, match=r"^schema: the arguments of a call are an object"):
            model.with_structured_output(schema, method="function_calling")


# Beside the tools of an agent's other prompts.


@tool
def archive(query: str) -> str:
    """Search the archive."""
    return query


TOOLS = [weather, archive]
MESSAGES = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]


def read(message):
    return message.usage_metadata["input_token_details"]["cache_read"]


def all_blocks(message):
    return (message.usage_metadata["input_tokens"] - 1) // BLOCK * BLOCK


METHODS = pytest.mark.parametrize("method", ["json_schema", "json_mode"])


@METHODS
def test_the_prompt_is_that_of_the_agent(model, gateway, method):
    gateway.script.text = json.dumps(FORECAST.model_dump())
    first = model.bind_tools(TOOLS).invoke(MESSAGES)
    structured = model.with_structured_output(
        Forecast, method=method, tools=TOOLS, include_raw=True
    )
    answer = structured.invoke(MESSAGES)
    assert (answer["parsed"], answer["parsing_error"]) == (FORECAST, None)
    assert answer["raw"].usage_metadata["input_tokens"] == first.usage_metadata["input_tokens"]
    assert read(answer["raw"]) == all_blocks(first) > 300


@METHODS
def test_without_the_tools_it_is_another_one(model, gateway, method):
    gateway.script.text = json.dumps(FORECAST.model_dump())
    first = model.bind_tools(TOOLS).invoke(MESSAGES)
    structured = model.with_structured_output(Forecast, method=method, include_raw=True)
    raw = structured.invoke(MESSAGES)["raw"]
    assert raw.usage_metadata["input_tokens"] < first.usage_metadata["input_tokens"]
    assert read(raw) < all_blocks(raw)


async def test_the_tools_cannot_be_called(model, gateway):
    gateway.script.text = called("weather", {"city": "Oslo"})
    assert model.bind_tools(TOOLS).invoke(MESSAGES).tool_calls  # which is what it wants to do
    structured = model.with_structured_output(OBJECT, tools=TOOLS, include_raw=True)
    for answer in (structured.invoke(MESSAGES), await structured.ainvoke(MESSAGES)):
        assert answer["raw"].tool_calls == []
        assert answer["parsed"].keys() == {"city", "degrees"}


def test_of_several_functions_only_the_schema_is_called(model, gateway):
    gateway.script.text = called("weather", {"city": "Oslo"})
    structured = model.with_structured_output(
        Forecast, method="function_calling", tools=TOOLS, include_raw=True
    )
    assert [call["name"] for call in structured.invoke(MESSAGES)["raw"].tool_calls] == ["Forecast"]
    gateway.script.text = called("Forecast", FORECAST.model_dump())
    assert structured.invoke(MESSAGES)["parsed"] == FORECAST


def test_strictness_of_the_schema_does_not_change_the_tools(model):
    structured = model.with_structured_output(
        Forecast, method="function_calling", tools=TOOLS, strict=True
    )
    tools = {each["function"]["name"]: each for each in structured.first.kwargs["tools"]}
    assert tools.pop("Forecast")["function"]["strict"] is True
    assert [*tools.values()] == model.bind_tools(TOOLS).kwargs["tools"]
