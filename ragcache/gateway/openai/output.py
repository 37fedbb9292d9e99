"""`response_format`: what the text of an answer has to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from ragcache.gateway.fields import Fields


class JsonSchemaFormat(Fields):
    """`response_format.json_schema`; the schema is checked where it is compiled.

    `strict` changes nothing, because every schema is enforced.
    """

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] = Field({"type": "object"}, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """`response_format` in all its forms."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("format", "json_schema belongs to type json_schema")
        return self

    @property
    def enforced(self) -> Mapping[str, Any] | None:
        """The JSON schema of the text, None for free text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None
