"""The words that every folder shares: sampling, messages, events, usage.

Standard library only, so that the index, the prompt code and the wire formats can be
read, imported and tested without torch or aiohttp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from ragcache.types.histogram import Histogram as Histogram
from ragcache.types.stats import BlockTimes as BlockTimes
from ragcache.types.stats import ClusterStats as ClusterStats
from ragcache.types.stats import EngineStats as EngineStats
from ragcache.types.stats import HostStats as HostStats
from ragcache.types.stats import HotPrefix as HotPrefix
from ragcache.types.stats import PoolCounts as PoolCounts


class FinishReason(StrEnum):
    """Why one choice ended; every choice ends exactly once."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens
    CONTEXT = "context"  # the model's context is full
    TOOL_CALLS = "tool_calls"  # the output holds at least one call
    ABORT = "abort"  # the client left


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen from the logits of one request.

    `max_tokens` None is the room that the prompt leaves in the model's context, 0 only writes the
    prompt's KV. `temperature` 0 is
    greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. The penalties follow OpenAI (presence,
    frequency: over generated tokens) and CTRL, arXiv 1909.05858 (repetition: over prompt and
    generated tokens). `logprobs` is the number of alternatives to report with each token, None
    for no log-probabilities at all; `prompt_logprobs` is the same for the tokens of the prompt,
    which then is computed anew. With a `seed`, the tokens of choice i depend on (seed, i, position)
    and the logits only, never on the rest of the batch.
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
    prompt_logprobs: int | None = None
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


TTL_SECONDS = {"auto": 0.0, "5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0}


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A client's cache marker: the prompt up to it is to stay cached for `ttl`.

    It stands behind the first `end` characters of message number `message`; with `message` None,
    behind the first `end` tools. `end` None is all of them. `ttl` is a key of `TTL_SECONDS`;
    "auto" is the gateway's own marker, which asks for no retention.
    """

    message: int | None
    end: int | None = None
    ttl: str = "5m"
    origin: Literal["explicit", "top_level", "implicit"] = "explicit"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to be rendered by the model's chat template.

    `tools` have OpenAI's form: {"type": "function", "function": {"name", "description",
    "parameters"}}. `breakpoints` are in the order of the request and never change the tokens.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    breakpoints: tuple[Breakpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What the output may be; a grammar enforces it, the prompt never changes with it.

    With `tool_choice` "required" the output is one or more calls; with "auto" it is text or calls,
    with "none" text. `allowed_tools` are the names that may be called, None is all. `schema` is a
    JSON schema for the text, None is free text; beside tools, the output is JSON or calls.
    """

    tool_choice: Literal["none", "auto", "required"] = "auto"
    allowed_tools: tuple[str, ...] | None = None
    parallel_tool_calls: bool = True
    schema: Mapping[str, Any] | bool | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to complete: a conversation, raw text, or token ids.

    Generation of a choice ends at any of the `stop` strings, which are not part of the text.
    `tenant` and `cache_salt` decide, with the model, which other requests share the cache.
    With `explicit_caching` only what lies before the last breakpoint is cached at all. With
    `echo` the prompt's text comes first. `previous_id` names the request to explain a miss by.
    """

    id: str
    prompt: ChatPrompt | str | tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    tenant: str = ""
    cache_salt: str | None = None
    output: OutputRules = OutputRules()
    explicit_caching: bool = False
    echo: bool = False
    previous_id: str | None = None


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
class Prefilled:
    """The prompt's KV is written; with log-probabilities of its tokens but the first, if asked."""

    logprobs: tuple[TokenLogprob, ...] = ()


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


EngineEvent = Admitted | Prefilled | Token | Finished | Failed


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A `TokenLogprob` with its tokens as text and as UTF-8 bytes, the way the wires show it."""

    token: str
    bytes: bytes
    logprob: float | None  # None: the first token of a prompt has none
    top: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call in the output; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in choice `index`: text, log-probabilities, calls, the end.

    `stop` is the stop string that ended the text.
    """

    index: int
    text: str = ""
    logprobs: tuple[TextLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    calls: tuple[ToolCall, ...] = ()
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `prompt_tokens` includes the cached ones.

    `written` has, for each ttl of its breakpoints, the tokens in whole blocks up to them that
    were not in the cache before.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    written: Mapping[str, int] = field(default_factory=dict)

    @property
    def written_tokens(self) -> int:
        """The sum over all ttls."""
        return sum(self.written.values())


class Segment(NamedTuple):
    """A named part of a prompt (`tools`, `system`, `messages.3` …): its tokens are [start, end)."""

    name: str
    start: int
    end: int


class MissReason(StrEnum):
    """Why a prompt was not found in the cache as far as it might have been."""

    COLD = "cold"  # nothing like it was computed here
    CHANGED = "changed"  # an earlier prompt is equal up to a place, and differs there
    EVICTED = "evicted"  # it was cached, and gave way to others
    EXPIRED = "expired"  # the same, after its retention had run out
    BELOW_BLOCK = "below_block"  # less than one block is shared
    NAMESPACE = "namespace"  # it is cached under another salt


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where and why the match of a prompt ended.

    `reason` is None when nothing was missed that could have been found. `token` is the first
    token that differs from the prompt of the request `previous`; where only its surroundings are
    known, `exact` is False and `token` the first that can differ. `character` counts within the
    content of `segment`. `lost_tokens` would have been hits otherwise.
    """

    prompt_tokens: int
    hit_tokens: int
    reason: MissReason | None = None
    lost_tokens: int = 0
    token: int | None = None
    exact: bool = True
    segment: str | None = None
    character: int | None = None
    previous: str | None = None
