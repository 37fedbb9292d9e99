"""Anthropic's content blocks, and the text that each of them is for the model.

The text of a block depends on nothing but the block, so that a document which moves to another
request is the same tokens there. Blocks are joined as they are, like the content parts of
OpenAI's routes; a document or search result brings its own line breaks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from ragcache.gateway.anthropic.cache import CacheControl
from ragcache.gateway.fields import Fields, PartList, one_of

_OUR_TAGS = re.compile(r"<(?=/?(?:document|search_result)\b)")


class Piece(NamedTuple):
    """Text of a prompt; with the `path` of a block that ends behind it and may be marked."""

    text: str
    path: str | None = None
    marker: CacheControl | None = None


def or_string(blocks: Any) -> BeforeValidator:
    """Take a string, where `blocks` are expected, for one block of text."""

    def listed(content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    return BeforeValidator(listed, json_schema_input_type=str | blocks)


class TextBlock(Fields):
    """Plain text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None

    @field_validator("cache_control")
    @classmethod
    def _on_text(cls, marker: CacheControl | None, info: ValidationInfo) -> CacheControl | None:
        if marker is not None and info.data.get("text") == "":
            raise PydanticCustomError("marker", "cannot be set on an empty text block")
        return marker

    def pieces(self, path: str) -> Iterator[Piece]:
        """The text; without any there is nothing to mark."""
        yield Piece(self.text, path if self.text else None, self.cache_control)


TextBlocks = PartList[TextBlock]
Texts = Annotated[TextBlocks, or_string(TextBlocks)]


class TextSource(Fields):
    """The text of a document."""

    type: Literal["text"]
    data: str

    def pieces(self, path: str) -> Iterator[Piece]:
        """The text as one line, or more."""
        yield Piece(f"{_as_data(self.data)}\n")


class ContentSource(Fields):
    """The chunks of a document."""

    type: Literal["content"]
    content: Texts

    def pieces(self, path: str) -> Iterator[Piece]:
        """Each chunk starts on a line of its own."""
        yield from _lines(self.content, path)


class Citations(Fields):
    """Whether the answer shall quote; the models here cannot."""

    enabled: Literal[False] = False


Source = Annotated[TextSource | ContentSource, one_of(TextSource | ContentSource)]


class DocumentBlock(Fields):
    """A document that is text."""

    type: Literal["document"]
    source: Source
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    cache_control: CacheControl | None = None

    def pieces(self, path: str) -> Iterator[Piece]:
        """The document in tags, each on a line of its own."""
        yield Piece(f"<document{_attribute('title', self.title)}>\n")
        if self.context:
            yield Piece(f"<context>\n{_as_data(self.context)}\n</context>\n")
        yield from self.source.pieces(f"{path}.source")
        yield Piece("</document>\n", path, self.cache_control)


class SearchResultBlock(Fields):
    """What a retriever found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: TextBlocks
    citations: Citations | None = None
    cache_control: CacheControl | None = None

    def pieces(self, path: str) -> Iterator[Piece]:
        """The chunks in a tag, each on a line of its own."""
        attributes = _attribute("source", self.source) + _attribute("title", self.title)
        yield Piece(f"<search_result{attributes}>\n")
        yield from _lines(self.content, path)
        yield Piece("</search_result>\n", path, self.cache_control)


Passage = TextBlock | DocumentBlock | SearchResultBlock
Passages = PartList[Annotated[Passage, one_of(Passage)]]


class ToolResultBlock(Fields):
    """What a tool returned for an earlier `ToolUseBlock`."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Passages | None, or_string(Passages | None)] = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    def pieces(self, path: str) -> Iterator[Piece]:
        """The result, announced if it is an error."""
        if self.is_error:
            yield Piece("Error: ")
        for i, block in enumerate(self.content or ()):
            yield from block.pieces(f"{path}.content[{i}]")
        yield Piece("", path, self.cache_control)


class ToolUseBlock(Fields):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]
    cache_control: CacheControl | None = None

    def call(self) -> dict[str, Any]:
        """The call in the form of `Message.tool_calls`, OpenAI's."""
        function = {"name": self.name, "arguments": json.dumps(self.input)}
        return {"id": self.id, "type": "function", "function": function}


class ThinkingBlock(Fields):
    """Thoughts of an earlier turn, which are no part of the prompt."""

    type: Literal["thinking", "redacted_thinking"]
    cache_control: Annotated[CacheControl | None, WithJsonSchema({"type": "null"})] = None

    @field_validator("cache_control")
    @classmethod
    def _never(cls, marker: CacheControl | None) -> None:
        if marker is not None:
            raise PydanticCustomError("marker", "cannot be set on a thinking block")

    def pieces(self, path: str) -> Iterator[Piece]:
        """Nothing."""
        yield from ()


def _lines(blocks: list[TextBlock], path: str) -> Iterator[Piece]:
    for i, block in enumerate(blocks):
        for piece in block.pieces(f"{path}.content[{i}]"):
            yield piece._replace(text=_as_data(piece.text))
        yield Piece("\n")


def _as_data(text: str) -> str:
    """Text of a passage, which can neither end the passage nor begin another."""
    return _OUR_TAGS.sub("&lt;", text)


def _attribute(name: str, value: str | None) -> str:
    return "" if value is None else f' {name}="{escape(value)}"'
