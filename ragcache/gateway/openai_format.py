"""What OpenAI's two completion routes answer: bodies, stream chunks, log-probabilities, usage."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar
from uuid import uuid4

from ragcache.types import Delta, FinishReason, TextLogprob, Usage

_LOWEST = -9999.0  # OpenAI's number for "not at all"; JSON has no -inf

Json = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One choice of a whole response, collected from its deltas."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        """Append what is new."""
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)


class Reply(ABC):
    """The answer to one request, whole or in chunks; all chunks have the same head."""

    id_prefix: ClassVar[str]
    whole: ClassVar[str]  # `object` of a body
    part: ClassVar[str]  # `object` of a chunk

    def __init__(self, model: str, *, include_usage: bool) -> None:
        self.id = f"{self.id_prefix}-{uuid4().hex}"
        self._model = model
        self._created = int(time.time())
        self._include_usage = include_usage

    def body(self, choices: Iterable[Choice], usage: Usage) -> Json:
        """The whole response."""
        return self._head(self.whole, [self._choice(choice) for choice in choices], usage)

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The chunks of one delta; text and finish reason never share one."""
        if delta.text or delta.logprobs:
            yield self._chunk(self._delta(delta))
        if delta.finish_reason is not None:
            yield self._chunk(self._end(delta.index, delta.finish_reason))

    def closing(self, usage: Usage) -> Iterator[Json]:
        """What follows the last choice: the usage, if it was asked for."""
        if self._include_usage:
            yield self._head(self.part, [], usage)

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
    def _choice(self, choice: Choice) -> Json: ...

    @abstractmethod
    def _delta(self, delta: Delta) -> Json: ...

    @abstractmethod
    def _end(self, index: int, reason: FinishReason) -> Json: ...


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    id_prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, *, include_usage: bool) -> None:
        super().__init__(model, include_usage=include_usage)
        self._introduced: set[int] = set()

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The chunks of one delta; a choice's first one says who speaks."""
        if delta.index not in self._introduced:
            self._introduced.add(delta.index)
            yield self._chunk(_streamed(delta.index, {"role": "assistant", "content": ""}))
        yield from super().chunks(delta)

    def _choice(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _chat_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _delta(self, delta: Delta) -> Json:
        return _streamed(delta.index, {"content": delta.text}, _chat_logprobs(delta.logprobs))

    def _end(self, index: int, reason: FinishReason) -> Json:
        return _streamed(index, {}, reason=reason)


class TextReply(Reply):
    """Of /v1/completions; `text_offset` counts characters from the start of a choice's text."""

    id_prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, *, include_usage: bool) -> None:
        super().__init__(model, include_usage=include_usage)
        self._offsets: defaultdict[int, int] = defaultdict(int)

    def _choice(self, choice: Choice) -> Json:
        return self._text(choice.index, choice.text, choice.logprobs, choice.finish_reason)

    def _delta(self, delta: Delta) -> Json:
        return self._text(delta.index, delta.text, delta.logprobs, None)

    def _end(self, index: int, reason: FinishReason) -> Json:
        return self._text(index, "", (), reason)

    def _text(
        self, index: int, text: str, logprobs: Sequence[TextLogprob], reason: FinishReason | None
    ) -> Json:
        legacy = self._legacy_logprobs(index, logprobs) if logprobs else None
        return {"index": index, "text": text, "logprobs": legacy, "finish_reason": reason}

    def _legacy_logprobs(self, index: int, logprobs: Sequence[TextLogprob]) -> Json:
        lengths = [len(entry.token) for entry in logprobs]
        *offsets, self._offsets[index] = accumulate(lengths, initial=self._offsets[index])
        return {
            "tokens": [entry.token for entry in logprobs],
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [_ranked(entry) for entry in logprobs],
            "text_offset": offsets,
        }


def usage_body(usage: Usage) -> Json:
    """OpenAI's `usage`; `prompt_tokens` includes the cached ones."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _streamed(
    index: int, delta: Json, logprobs: Json | None = None, reason: FinishReason | None = None
) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _chat_logprobs(logprobs: Sequence[TextLogprob]) -> Json | None:
    if not logprobs:
        return None
    content = [
        {**_entry(entry), "top_logprobs": [_entry(other) for other in entry.top]}
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


def _entry(entry: TextLogprob) -> Json:
    return {
        "token": entry.token,
        "logprob": _finite(entry.logprob),
        "bytes": list(entry.bytes),
    }


def _ranked(entry: TextLogprob) -> dict[str, float]:
    """The alternatives and the chosen token, as in the legacy format."""
    return {other.token: _finite(other.logprob) for other in (*entry.top, entry)}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
