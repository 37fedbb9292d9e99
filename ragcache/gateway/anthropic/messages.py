"""From Anthropic's system prompt and messages to the conversation that is rendered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Annotated, Literal

from ragcache.errors import InvalidRequest
from ragcache.gateway.anthropic.blocks import (
    DocumentBlock,
    Piece,
    SearchResultBlock,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    or_string,
)
from ragcache.gateway.anthropic.cache import Spot
from ragcache.gateway.fields import Fields, MessageList, PartList, one_of
from ragcache.types import Message

# Claude Code's first line is another one in every request: no prompt would share a prefix.
_BILLING = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")

UserBlock = TextBlock | DocumentBlock | SearchResultBlock | ToolResultBlock
UserBlocks = PartList[Annotated[UserBlock, one_of(UserBlock)]]
AssistantBlock = TextBlock | ThinkingBlock | ToolUseBlock
AssistantBlocks = PartList[Annotated[AssistantBlock, one_of(AssistantBlock)]]


class Conversation:
    """The messages of a prompt as they come, and the places in them that may be marked."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.spots: list[Spot] = []
        self.waiting_calls: set[str] = set()  # ids of those that have no result yet

    def say(
        self,
        role: str,
        pieces: Iterable[Piece],
        *,
        calls: Sequence[tuple[str, ToolUseBlock]] = (),
        tool_call_id: str | None = None,
    ) -> None:
        """Append a message; `calls` come with their paths."""
        number, texts, length = len(self.messages), [], 0
        for text, path, marker in pieces:
            texts.append(text)
            length += len(text)
            if path is not None:
                self.spots.append(Spot(path, marker, number, length))
        # Templates write all calls of a message at its end: there is no place between them.
        self.spots += [Spot(path, call.cache_control, number, None) for path, call in calls]
        self.waiting_calls.update(call.id for _, call in calls)
        tool_calls = tuple(call.call() for _, call in calls)
        message = Message(role, "".join(texts), tool_calls=tool_calls, tool_call_id=tool_call_id)
        self.messages.append(message)


class UserMessage(Fields):
    """What the user says, and what tools returned."""

    role: Literal["user"]
    content: Annotated[UserBlocks, or_string(UserBlocks)]

    def join(self, conversation: Conversation, path: str) -> None:
        """Tool results are messages of their own, in front of the rest."""
        results = 0
        rest: list[Piece] = []
        for i, block in enumerate(self.content):
            place = f"{path}.content[{i}]"
            if isinstance(block, ToolResultBlock):
                _answer_call(conversation, place, block.tool_use_id)
                conversation.say("tool", block.pieces(place), tool_call_id=block.tool_use_id)
                results += 1
            else:
                rest += block.pieces(place)
        if not results or any(piece.text for piece in rest):
            conversation.say("user", rest)


def _answer_call(conversation: Conversation, place: str, call_id: str) -> None:
    if call_id not in conversation.waiting_calls:
        param = f"{place}.tool_use_id"
        why = f"no earlier tool_use with the id {call_id!r} waits for a result"
        raise InvalidRequest(f"{param}: {why}", param=param)
    conversation.waiting_calls.remove(call_id)


class AssistantMessage(Fields):
    """What the assistant said, and the calls it made."""

    role: Literal["assistant"]
    content: Annotated[AssistantBlocks, or_string(AssistantBlocks)]

    def join(self, conversation: Conversation, path: str) -> None:
        """One message: its text, then its calls."""
        texts: list[Piece] = []
        calls: list[tuple[str, ToolUseBlock]] = []
        for i, block in enumerate(self.content):
            place = f"{path}.content[{i}]"
            if isinstance(block, ToolUseBlock):
                calls.append((place, block))
            else:
                texts += block.pieces(place)
        conversation.say("assistant", texts, calls=calls)


class SystemMessage(Fields):
    """Instructions in the middle of a conversation: what comes before them stays cached."""

    role: Literal["system"]
    content: Texts

    def join(self, conversation: Conversation, path: str) -> None:
        """One message, where it stands."""
        pieces = (block.pieces(f"{path}.content[{i}]") for i, block in enumerate(self.content))
        conversation.say("system", chain.from_iterable(pieces))


AnyMessage = UserMessage | AssistantMessage | SystemMessage
Messages = MessageList[Annotated[AnyMessage, one_of(AnyMessage, "role")]]


def without_billing(blocks: Sequence[TextBlock]) -> Iterator[Piece]:
    """The system prompt without the billing lines at its head."""
    at_head = True
    for i, block in enumerate(blocks):
        text = _BILLING.sub("", block.text) if at_head else block.text
        if text:
            at_head = False
            yield Piece(text, f"system[{i}]", block.cache_control)
