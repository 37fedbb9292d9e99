"""The building blocks of request schemas: strict objects, short lists, integers, tagged unions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from ragcache.errors import InvalidRequest


class Fields(BaseModel):
    """An object that a client sends: nothing is coerced, unknown fields are tolerated."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", frozen=True)


Harmless = Mapping[str, tuple[Any, ...]]  # field → values that ask for nothing, besides null


class RequestBody(Fields):
    """The body of a request; every other value of an `unsupported` field is refused."""

    unsupported: ClassVar[Harmless] = {}

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, body: Any) -> Any:
        """Take null for "not given", as both APIs do, and refuse what we cannot do."""
        if not isinstance(body, dict):
            raise PydanticCustomError("object", "the request body must be a JSON object")
        given = {name: value for name, value in body.items() if value is not None}
        for name, harmless in cls.unsupported.items():
            if name in given and given[name] not in harmless:
                raise InvalidRequest(f"{name}: this value is not supported", param=name)
        return given


def _whole(value: Any) -> Any:
    """1e12 and 5.0 are integers in JSON Schema; True and "5" are not."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Item = TypeVar("Item")

# They end at their first bad item: to describe a million of them would take seconds.
MessageList = Annotated[list[Item], Field(max_length=10_000, fail_fast=True)]
PartList = Annotated[list[Item], Field(max_length=4096, fail_fast=True)]
ToolList = Annotated[list[Item], Field(max_length=128, fail_fast=True)]

# Behind a Field with limits: in front of it, these would be missing in the JSON schema.
WHOLE = BeforeValidator(_whole)
Whole = Annotated[int, WHOLE]


def one_of(union: Any, tag: str = "type") -> PlainValidator:
    """Check an object as the member of `union` that its field `tag` names.

    Pydantic's own discriminated unions would put the tag into the path of every error below.
    """
    members = {
        value: member
        for member in get_args(union)
        for value in get_args(member.model_fields[tag].annotation)
    }

    def check(fields: Any) -> Any:
        if not isinstance(fields, dict):
            raise PydanticCustomError("object", "must be an object")
        value = fields.get(tag)
        member = members.get(value) if isinstance(value, str) else None
        if member is None:
            raise _unknown(tag, value, members)
        return member.model_validate(fields)

    return PlainValidator(check, json_schema_input_type=union)


def _unknown(tag: str, value: Any, known: dict[str, Any]) -> ValidationError:
    error = PydanticCustomError(
        "tag",
        "{value} is not supported here, only {known}",
        {"value": repr(value)[:100], "known": ", ".join(map(repr, known))},
    )
    return ValidationError.from_exception_data(
        tag, [InitErrorDetails(type=error, loc=(tag,), input=value)]
    )
