"""What OpenAI's two completion routes answer: bodies, stream chunks, usage."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from uuid import uuid4

from ragcache.gateway.openai.logprobs import Json, LegacyLogprobs, chat_logprobs
from ragcache.types import Delta, FinishReason, TextLogprob, ToolCall, Usage


@dataclass(slots=True)
class Choice:
    """One choice of a whole response, collected from its deltas."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        """Append what is new."""
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.calls.extend(delta.calls)
        self.finish_reason = delta.finish_reason

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)


class Reply(ABC):
    """The answer to one request, whole or in chunks; all chunks have the same head.

    `extension` gives the fields of our own for a body, or for the last chunk of a stream.
    """

    id_prefix: ClassVar[str]
    whole: ClassVar[str]  # `object` of a body
    part: ClassVar[str]  # `object` of a chunk

    def __init__(self, model: str, *, include_usage: bool) -> None:
        self.id = f"{self.id_prefix}-{uuid4().hex}"
        self.extension: Callable[[], Json] = dict
        self._model = model
        self._created = int(time.time())
        self._include_usage = include_usage

    def body(self, choices: Iterable[Choice], usage: Usage) -> Json:
        """The whole response."""
        body = self._head(self.whole, [self._whole_choice(choice) for choice in choices], usage)
        return body | self.extension()

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The chunks of one delta; content and finish reason never share one."""
        for choice in self._parts(delta):
            yield self._chunk(choice)
        if delta.finish_reason is not None:
            end = self._chunk(self._end(delta.index, delta.finish_reason))
            yield end if self._include_usage else end | self.extension()

    def closing(self, usage: Usage) -> Iterator[Json]:
        """What follows the last choice: the usage, if it was asked for."""
        if self._include_usage:
            yield self._head(self.part, [], usage) | self.extension()

    def _chunk(self, choice: Json) -> Json:
        chunk = self._head(self.part, [choice], None)
        if not self._include_usage:
            del chunk["usage"]
        return chunk

    def _head(self, kind: str, choices: Sequence[Json], usage: Usage | None) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": None if usage is None else usage_body(usage),
        }

    @abstractmethod
    def _whole_choice(self, choice: Choice) -> Json: ...

    @abstractmethod
    def _parts(self, delta: Delta) -> Iterator[Json]: ...

    @abstractmethod
    def _end(self, index: int, reason: FinishReason) -> Json: ...


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    id_prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, *, include_usage: bool) -> None:
        super().__init__(model, include_usage=include_usage)
        self._introduced: set[int] = set()
        self._called: defaultdict[int, int] = defaultdict(int)  # choice → its calls so far

    def _whole_choice(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "message": _message(choice),
            "logprobs": chat_logprobs(choice.logprobs),
            "finish_reason": _reason(choice.finish_reason),
        }

    def _parts(self, delta: Delta) -> Iterator[Json]:
        if delta.index not in self._introduced:
            self._introduced.add(delta.index)
            content = None if delta.calls and not delta.text else ""
            yield _streamed(delta.index, {"role": "assistant", "content": content})
        if delta.text or delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs)
            yield _streamed(delta.index, {"content": delta.text}, logprobs)
        for call in delta.calls:
            for part in self._call_parts(delta.index, call):
                yield _streamed(delta.index, {"tool_calls": [part]})

    def _call_parts(self, choice: int, call: ToolCall) -> Iterator[Json]:
        """Clients expect the name first and the arguments after it."""
        number = self._called[choice]
        self._called[choice] += 1
        yield {"index": number, **_call(ToolCall(call.name, ""))}
        yield {"index": number, "function": {"arguments": call.arguments}}

    def _end(self, index: int, reason: FinishReason) -> Json:
        return _streamed(index, {}, reason=reason)


class TextReply(Reply):
    """Of /v1/completions."""

    id_prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, *, include_usage: bool) -> None:
        super().__init__(model, include_usage=include_usage)
        self._logprobs: defaultdict[int, LegacyLogprobs] = defaultdict(LegacyLogprobs)

    def _whole_choice(self, choice: Choice) -> Json:
        return self._text(choice.index, choice.text, choice.logprobs, choice.finish_reason)

    def _parts(self, delta: Delta) -> Iterator[Json]:
        if delta.text or delta.logprobs:
            yield self._text(delta.index, delta.text, delta.logprobs, None)

    def _end(self, index: int, reason: FinishReason) -> Json:
        return self._text(index, "", (), reason)

    def _text(
        self, index: int, text: str, logprobs: Sequence[TextLogprob], reason: FinishReason | None
    ) -> Json:
        legacy = self._logprobs[index].body(logprobs) if logprobs else None
        return {"index": index, "text": text, "logprobs": legacy, "finish_reason": _reason(reason)}


def usage_body(usage: Usage) -> Json:
    """OpenAI's `usage`; `prompt_tokens` includes the cached ones."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.written_tokens,
        },
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def _reason(reason: FinishReason | None) -> str | None:
    """OpenAI does not tell a full context from a limit that the client set."""
    told = FinishReason.LENGTH if reason is FinishReason.CONTEXT else reason
    return told and told.value


def _message(choice: Choice) -> Json:
    message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = list(map(_call, choice.calls))
    return message


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def _streamed(
    index: int, delta: Json, logprobs: Json | None = None, reason: FinishReason | None = None
) -> Json:
    finish_reason = _reason(reason)
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
