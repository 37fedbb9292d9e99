"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from ragcache.types import TextLogprob

_LOWEST = -9999.0  # OpenAI's number for "not at all"; JSON has no -inf

Json = dict[str, Any]


def chat_logprobs(logprobs: Sequence[TextLogprob]) -> Json | None:
    """The form of chats: an object for each token."""
    if not logprobs:
        return None
    content = [
        {**_entry(entry), "top_logprobs": [_entry(other) for other in entry.top]}
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


class LegacyLogprobs:
    """The form of /v1/completions, parallel lists, for one choice from its first token on.

    `text_offset` counts characters from the start of the choice's text, what is echoed included;
    a token may start inside of one.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def body(self, logprobs: Sequence[TextLogprob]) -> Json:
        """The lists for the next tokens."""
        return {
            "tokens": [entry.token for entry in logprobs],
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [_ranked(entry) for entry in logprobs],
            "text_offset": [self._start(entry.bytes) for entry in logprobs],
        }

    def _start(self, token: bytes) -> int:
        start = self._offset
        self._offset += len(self._decoder.decode(token))
        return start


def _entry(entry: TextLogprob) -> Json:
    return {
        "token": entry.token,
        "logprob": _finite(entry.logprob),
        "bytes": list(entry.bytes),
    }


def _ranked(entry: TextLogprob) -> dict[str, float | None] | None:
    """The alternatives and the chosen token; null for a prompt's first token."""
    if entry.logprob is None:
        return None
    return {other.token: _finite(other.logprob) for other in (*entry.top, entry)}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST)
