"""Which part of a rendered prompt came from which part of the request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

from ragcache.errors import InvalidRequest
from ragcache.prompt.control import PLACE_CLOSE, PLACE_OPEN, ControlTokens
from ragcache.prompt.template import ChatTemplate, Conversation
from ragcache.types import Breakpoint

_HEAD_ROLES = ("system", "developer")
_MARK = re.compile(f"{PLACE_OPEN}([0-9]+){PLACE_CLOSE}")


class Part(NamedTuple):
    """A named stretch of the rendering that starts where the one before it ends."""

    name: str
    end: int  # in characters
    message: int | None = None  # the part ends with the content of this message


class Outline(NamedTuple):
    """The parts of a rendering, in order, and the characters up to each breakpoint."""

    parts: tuple[Part, ...]
    breakpoints: tuple[int | None, ...]


class _Place(NamedTuple):
    """A place in the client's strings at which a part or a breakpoint ends."""

    field: Literal["content", "calls", "tools"]
    number: int  # of the message; of the tool
    end: int = 0  # in the content; calls and tools end with their last string


def outline(
    template: ChatTemplate,
    conversation: Conversation,
    breakpoints: Sequence[Breakpoint],
    rendered: str,
) -> Outline:
    """Find system, tools, messages.N and generation_prompt in `rendered`, and the breakpoints.

    The conversation is rendered once more, with a mark behind the last character of each message
    that is no white space (or behind the last string of its last tool call), of the last tool, and
    before each breakpoint. A part runs from the mark of the part before it to its own, so what
    the template writes behind a message counts to what follows. Adjacent system messages at the
    head are one part. An empty message, or one that the template leaves out, has no part of its
    own, and a breakpoint in it no place.

    A template that inspects the strings, and so renders something else with the marks, is given
    another try without those in the tools. If that does not help, the only part is `prompt`.
    A breakpoint at the end of the last message that was not found stands where the generation
    prompt starts, if the rendering without one is how the whole begins; others have no place.
    """
    names = _part_names(conversation)
    wanted = [_breakpoint_place(template.control, conversation, point) for point in breakpoints]
    places = list(dict.fromkeys([*names, *filter(None, wanted)]))
    ends = _find(template, conversation, places, rendered)
    found = [ends.get(place) if ends and place else None for place in wanted]
    for number, point in enumerate(breakpoints):
        if found[number] is None and _is_last(point, conversation):
            found[number] = _generation_start(template, conversation, rendered)
    if ends is None:
        return Outline((Part("prompt", len(rendered)),), tuple(found))
    named = ((names[place], place, end) for place, end in ends.items() if place in names)
    parts = [*_merge(named), Part("generation_prompt", len(rendered))]
    return Outline(tuple(parts), tuple(found))


def _part_names(conversation: Conversation) -> dict[_Place, str]:
    """The place at which each part ends."""
    roles = [message["role"] for message in conversation.messages]
    head = next((i for i, role in enumerate(roles) if role not in _HEAD_ROLES), len(roles))
    names = {}
    for index, message in enumerate(conversation.messages):
        if place := _message_end(index, message):
            names[place] = "system" if index < head else f"messages.{index}"
    if conversation.tools:
        names[_Place("tools", len(conversation.tools) - 1)] = "tools"
    return names


def _message_end(index: int, message: Mapping[str, Any]) -> _Place | None:
    if message.get("tool_calls"):
        return _Place("calls", index)
    end = len(message["content"].rstrip())
    return _Place("content", index, end) if end else None


def _breakpoint_place(
    control: ControlTokens, conversation: Conversation, point: Breakpoint
) -> _Place | None:
    if point.message is None:
        count = len((conversation.tools or ())[: point.end])
        return _Place("tools", count - 1) if count else None
    message = conversation.messages[point.message]
    if point.end is None:
        return _message_end(point.message, message)
    content = message["content"]
    end = len(content[: control.locate(content, point.end)].rstrip())
    return _Place("content", point.message, end) if end else None


def _is_last(point: Breakpoint, conversation: Conversation) -> bool:
    return point.end is None and point.message == len(conversation.messages) - 1


def _generation_start(
    template: ChatTemplate, conversation: Conversation, rendered: str
) -> int | None:
    try:
        plain = template.render(conversation, generation_prompt=False)
    except InvalidRequest:
        return None
    return len(plain) if rendered.startswith(plain) else None


def _merge(named: Iterable[tuple[str, _Place, int]]) -> Iterator[Part]:
    for name, group in groupby(named, key=lambda item: item[0]):
        (_, place, end), *more = reversed(list(group))
        ends_content = place.field == "content" and not more
        yield Part(name, end, place.number if ends_content else None)


def _find(
    template: ChatTemplate, conversation: Conversation, places: list[_Place], rendered: str
) -> dict[_Place, int] | None:
    """Where each place is in `rendered`, in the order of the rendering."""
    ends = _find_all(template, conversation, places, rendered)
    in_messages = [place for place in places if place.field != "tools"]
    if ends is None and len(in_messages) < len(places):
        return _find_all(template, conversation, in_messages, rendered)
    return ends


def _find_all(
    template: ChatTemplate, conversation: Conversation, places: list[_Place], rendered: str
) -> dict[_Place, int] | None:
    """`_find` in one rendering; None if the marks change it."""
    try:
        texts = _MARK.split(template.render(_with_marks(conversation, places)))
    except InvalidRequest:
        return None
    if "".join(texts[::2]) != rendered:
        return None
    ends: dict[_Place, int] = {}
    end = 0
    for text, number in zip(texts[::2], texts[1::2], strict=False):  # a text comes last
        end += len(text)
        ends.setdefault(places[int(number)], end)
    return ends


def _with_marks(conversation: Conversation, places: list[_Place]) -> Conversation:
    messages, tools = list(conversation.messages), list(conversation.tools or ())
    marks = {place: f"{PLACE_OPEN}{number}{PLACE_CLOSE}" for number, place in enumerate(places)}
    for place in sorted(places, reverse=True):  # later ones first: they move nothing
        if place.field == "tools":
            tool = tools[place.number]
            tools[place.number] = _mark_last(tool, marks[place]) or tool
        else:
            message = messages[place.number]
            messages[place.number] = _mark_message(message, place, marks[place])
    return Conversation(messages, tools or None, conversation.options)


def _mark_message(message: dict[str, Any], place: _Place, mark: str) -> dict[str, Any]:
    if place.field == "calls":
        *calls, last = message["tool_calls"]
        return {**message, "tool_calls": [*calls, _mark_call(last, mark)]}
    content, end = message["content"], place.end
    return {**message, "content": f"{content[:end]}{mark}{content[end:]}"}


def _mark_call(call: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    function = call["function"]
    for field in ("arguments", "name"):
        if (marked := _mark_last(function.get(field), mark)) is not None:
            return {**call, "function": {**function, field: marked}}
    return call


def _mark_last(value: Any, mark: str) -> Any:
    """`value` with a mark behind its last string, key or value; None if there is none."""
    if isinstance(value, str):
        end = len(value.rstrip())
        return f"{value[:end]}{mark}{value[end:]}" if end else None
    if isinstance(value, Mapping):
        for key in reversed(list(value)):
            if (item := _mark_last(value[key], mark)) is not None:
                return {**value, key: item}
            if (name := _mark_last(key, mark)) is not None:
                return {name if other == key else other: value[other] for other in value}
    if isinstance(value, list | tuple):
        for index in reversed(range(len(value))):
            if (item := _mark_last(value[index], mark)) is not None:
                return [*value[:index], item, *value[index + 1 :]]
    return None
