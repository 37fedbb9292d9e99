"""The words that every folder shares: sampling, messages, events, usage.

Standard library only, so that the index, the prompt code and the wire formats can be
read, imported and tested without torch or aiohttp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    """Why one choice ended; every choice ends exactly once."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the client left


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen from the logits of one request.

    `max_tokens` None is the room that the prompt leaves in the model's context. `temperature` 0 is
    greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. The penalties follow OpenAI (presence,
    frequency: over generated tokens) and CTRL, arXiv 1909.05858 (repetition: over prompt and
    generated tokens). `logprobs` is the number of alternatives to report with each token, None
    for no log-probabilities at all. With a `seed`, the tokens of choice i depend on (seed, i,
    position) and the logits only, never on the rest of the batch.
    """

    max_tokens: int | None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, its content already joined into text."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to be rendered by the model's chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to complete: a conversation, raw text, or token ids.

    Generation of a choice ends at any of the `stop` strings, which are not part of the text.
    `tenant` and `cache_salt` decide, with the model, which other requests share the cache.
    """

    id: str
    prompt: ChatPrompt | str | tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    tenant: str = ""
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities (natural logarithm, of the unmodified logits) at one position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request left the queue: its prefix hit is known."""

    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token of choice `index`; a token that ends the choice is not announced."""

    index: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of choice `index`; `num_tokens` counts its tokens, an end token included."""

    index: int
    reason: FinishReason
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that the model could not answer; the engine goes on."""

    message: str


EngineEvent = Admitted | Token | Finished | Failed


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """KV blocks by state; free + cached + held = total."""

    free: int
    cached: int
    held: int

    @property
    def total(self) -> int:
        """All physical blocks of the pool."""
        return self.free + self.cached + self.held


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine: requests by state, blocks by state, counters since its start.

    Every prompt token is counted once, at admission, in `query_tokens`, and there in
    `hit_tokens` too when its KV came from the cache. `computed_tokens` are the tokens that went
    through the model, those of a request resumed after preemption again.
    """

    running: int
    waiting: int
    pool: PoolCounts
    block_size: int
    query_tokens: int
    hit_tokens: int
    evictions: int
    preemptions: int
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A `TokenLogprob` with its tokens as text and as UTF-8 bytes, the way the wires show it."""

    token: str
    bytes: bytes
    logprob: float
    top: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in choice `index`: text, the log-probabilities of its tokens, the end."""

    index: int
    text: str = ""
    logprobs: tuple[TextLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `prompt_tokens` includes the cached ones."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
