"""`with_structured_output`: a schema that is kept by decoding, and the parser of what comes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.base import BaseLLMOutputParser
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
)
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_function
from langchain_core.utils.pydantic import is_basemodel_subclass

from langchain_ragcache.tools import AnyTool

if TYPE_CHECKING:
    from langchain_core.utils.pydantic import TBaseModel  # noqa: F401  # mypy's plugin wants it

Json = dict[str, Any]
Schema = Json | type
Method = Literal["json_schema", "function_calling", "json_mode"]

_OBJECTS = {"$ref", "allOf", "anyOf", "oneOf", "properties"}  # keywords that objects may have
_KEYWORDS = {"const", "enum", "items", "prefixItems", "type"} | _OBJECTS


def structured_output(
    model: BaseChatModel,
    schema: Schema | None,
    method: Method,
    strict: bool | None,
    tools: Sequence[AnyTool],
    fields: Json,
) -> tuple[Runnable[Any, AIMessage], Runnable[Any, Any]]:
    """The model with what enforces `schema` and other `fields`, and the parser of its answers.

    `tools` are in the prompt, where those of the agent's other prompts are, and are not called.

    Raises ValueError for an unknown method, or where a schema is missing or cannot be used.
    """
    if schema is None and method != "json_mode":
        raise ValueError(f"schema: is required with method {method!r}")
    if method == "function_calling":
        assert schema is not None
        return _with_call(model, schema, strict, tools, fields)
    if method not in ("json_schema", "json_mode"):
        raise ValueError(
            f"method: {method!r} is none of 'json_schema', 'function_calling', 'json_mode'"
        )
    wire = {"type": "json_object"} if method == "json_mode" else response_format(schema, strict)
    uncalled = {"tool_choice": "none"} if tools else {}
    fields = {"response_format": wire, **uncalled, **_traced(schema, method, strict), **fields}
    bound = model.bind_tools(tools, **fields)
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return bound, WholeObject(pydantic_object=schema)
    return bound, WholeJson()


def response_format(schema: Any, strict: bool | None = None) -> Json:
    """The request's `response_format` for a class, a JSON schema, or what has this form already.

    Raises ValueError for anything else.
    """
    if isinstance(schema, dict) and schema.get("type") in ("json_schema", "json_object", "text"):
        return schema
    function = _function(schema, strict)
    function["name"] = _name(function["name"])
    function["schema"] = function.pop("parameters")
    return {"type": "json_schema", "json_schema": function}


def parsed_beside_raw(
    answers: Runnable[Any, AIMessage], parser: Runnable[Any, Any]
) -> Runnable[Any, Json]:
    """The message as `raw`, what was parsed or None, and the `parsing_error` or None."""
    success = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failure = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=answers) | success.with_fallbacks(
        [failure], exception_key="parsing_error"
    )


class _Whole(BaseLLMOutputParser[Any]):
    """Refuses JSON that `max_tokens` has cut off: what is left of it would pass for an answer."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """See `BaseLLMOutputParser`; raises OutputParserException."""
        (generation, *_) = result
        if isinstance(generation, ChatGeneration):
            message = generation.message
            if message.response_metadata.get("finish_reason") == "length":
                raise OutputParserException(
                    "the answer ended at max_tokens before its JSON was complete",
                    llm_output=message.text,
                )
        return super().parse_result(result, partial=partial)  # type: ignore[safe-super]


class WholeJson(_Whole, JsonOutputParser):
    """Dicts; parts of them while they are streamed."""


class WholeObject(_Whole, PydanticOutputParser[Any]):
    """Objects of a pydantic class."""


class WholeCall(_Whole, JsonOutputKeyToolsParser):
    """The arguments of a call as a dict."""


class WholeObjectCall(_Whole, PydanticToolsParser):
    """The arguments of a call as an object of a pydantic class."""


def _with_call(
    model: BaseChatModel,
    schema: Schema,
    strict: bool | None,
    tools: Sequence[AnyTool],
    fields: Json,
) -> tuple[Runnable[Any, AIMessage], Runnable[Any, Any]]:
    function = _function(schema, strict)
    name, parameters = function["name"], function["parameters"]
    if parameters.get("type") != "object" and not _OBJECTS & parameters.keys():
        raise ValueError(f"schema: the arguments of a call are an object, which {name} is not")
    bound = model.bind_tools(
        [*tools, {"type": "function", "function": function}],
        tool_choice=name,
        **_traced(schema, "function_calling", strict),
        **fields,
    )
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return bound, WholeObjectCall(tools=[schema], first_tool_only=True)
    return bound, WholeCall(key_name=name, first_tool_only=True)


def _function(schema: Any, strict: bool | None) -> Json:
    """A class, a tool's definition or a JSON schema as a function, whose `parameters` it is."""
    try:
        function = convert_to_openai_function(_definition(schema))
    except (TypeError, ValueError) as error:
        raise ValueError(f"schema: {schema!r} is neither a class nor a JSON schema") from error
    if "parameters" not in function:
        raise ValueError(f"schema: {schema!r} has no JSON schema")
    return convert_to_openai_function(function, strict=strict)


def _definition(schema: Any) -> Any:
    """What LangChain converts: of JSON schemas only those with a title and `properties`."""
    if not isinstance(schema, dict) or {"parameters", "input_schema"} & schema.keys():
        return schema
    if "function" in schema:
        return schema["function"]
    if not _KEYWORDS & schema.keys():
        return schema
    parameters = dict(schema)
    definition = {"name": _name(parameters.pop("title", None) or "answer")}
    if "description" in parameters:
        definition["description"] = parameters.pop("description")
    return {**definition, "parameters": parameters}


def _name(text: str) -> str:
    """`text` in the characters and the length that names may have."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)[:64]


def _traced(schema: Schema | None, method: Method, strict: bool | None) -> Json:
    """What LangChain's tracers get to see of it."""
    kwargs = {"method": method, "strict": strict}
    return {"ls_structured_output_format": {"kwargs": kwargs, "schema": schema}}
