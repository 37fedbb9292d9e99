"""Which part of a rendered prompt came from which part of the request."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from ragcache.errors import InvalidRequest
from ragcache.prompt.template import ChatTemplate, Conversation

_HEAD_ROLES = ("system", "developer")


class Mark(NamedTuple):
    """A named stretch of the rendering that starts where the one before it ends."""

    name: str
    end: int  # in characters


class Segment(NamedTuple):
    """A named part of a prompt: its tokens are [start, end)."""

    name: str
    start: int
    end: int


def outline(template: ChatTemplate, conversation: Conversation, rendered: str) -> list[Mark]:
    """Name the parts of `rendered` in order: system, tools, messages.N, generation_prompt.

    Message N ends where the rendering of messages 0..N stops agreeing with the whole. Where a
    template rewrites earlier messages, a part is empty and its text belongs to a later one.
    Every message has its part; system messages at the head share one.
    """
    ends = _message_ends(template, conversation, rendered, with_tools=True)
    head = _head_length(conversation)
    marks = [Mark("system", ends[head - 1])] if head else []
    marks += [Mark(f"messages.{i}", end) for i, end in enumerate(ends) if i >= head]
    if conversation.tools:
        marks = _cut_out_tools(template, conversation, rendered, marks)
    return [*marks, Mark("generation_prompt", len(rendered))]


def _head_length(conversation: Conversation) -> int:
    roles = [message["role"] for message in conversation.messages]
    return next((i for i, role in enumerate(roles) if role not in _HEAD_ROLES), len(roles))


def _message_ends(
    template: ChatTemplate, conversation: Conversation, rendered: str, *, with_tools: bool
) -> list[int]:
    ends, end = [], 0
    for count in range(1, len(conversation.messages) + 1):
        try:
            prefix = template.render(
                conversation, end=count, with_tools=with_tools, generation_prompt=False
            )
        except InvalidRequest:  # such as a system message on its own: its text joins the next part
            prefix = ""
        end = max(end, _common_prefix(prefix, rendered))
        ends.append(end)
    return ends


def _cut_out_tools(
    template: ChatTemplate, conversation: Conversation, rendered: str, marks: list[Mark]
) -> list[Mark]:
    """Cut the part that grew most by the tools into the tools and its own text."""
    plain = template.render(conversation, with_tools=False)
    plain_ends = _message_ends(template, conversation, plain, with_tools=False)
    first = len(plain_ends) - len(marks)  # system messages share one part
    spans = list(pairwise([0, *(mark.end for mark in marks)]))
    plain_spans = list(pairwise([0, *plain_ends[first:]]))
    growth = [(b - a) - (d - c) for (a, b), (c, d) in zip(spans, plain_spans, strict=True)]
    grown = max(range(len(growth)), key=growth.__getitem__)
    if growth[grown] <= 0:
        return marks
    text, without = rendered[slice(*spans[grown])], plain[slice(*plain_spans[grown])]
    after = _common_prefix(text[::-1], without[::-1])
    before = _common_prefix(text, without[: len(without) - after])
    name, end = marks[grown]
    content = conversation.messages[first + grown]["content"].strip()
    if content in text[len(text) - after :]:
        cut = [Mark("tools", end - after), Mark(name, end)]
    else:
        cut = [Mark(name, end - len(text) + before), Mark("tools", end)]
    return [*marks[:grown], *cut, *marks[grown + 1 :]]


def _common_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix; by bisection, to compare at memory speed."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low
