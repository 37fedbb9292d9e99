"""What OpenAI's two completion routes have in common, checked.

Fields and ranges follow OpenAI's API reference; `top_k`, `min_p`, `repetition_penalty`,
`min_tokens`, `ignore_eos`, `stop_token_ids` and `cache_salt` are the usual extensions of open
servers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from ragcache.errors import InvalidRequest
from ragcache.gateway.fields import WHOLE, Fields, Harmless, RequestBody, Whole
from ragcache.gateway.openai.messages import Id
from ragcache.types import ChatPrompt, GenerateRequest, SamplingParams

# what neither route does
UNSUPPORTED: Harmless = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}

MAX_TOKEN_IDS = 1024  # in a logit_bias or stop_token_ids: each costs time in every step


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Limit = Annotated[int, Field(ge=0), WHOLE]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
StopString = Annotated[str, Field(min_length=1)]
StopStrings = Annotated[list[StopString], Field(max_length=4, fail_fast=True)]
Stop = Annotated[
    StopStrings, BeforeValidator(_listed, json_schema_input_type=StopString | StopStrings)
]


class StreamOptions(Fields):
    """`stream_options` of both routes."""

    include_usage: bool = False


class Extension(Fields):
    """`ragcache`, our own field of both routes.

    With `explain` the answer tells why the cache hit as far as it did, compared with the request
    `previous_id` if one is named.
    """

    explain: bool = False
    previous_id: Id | None = None


class CompletionFields(RequestBody, ABC):
    """What both routes have in common."""

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Whole = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: Seed | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] = Field(
        {}, max_length=MAX_TOKEN_IDS, fail_fast=True
    )
    stop: Stop = Field([])
    stop_token_ids: list[Whole] = Field([], max_length=MAX_TOKEN_IDS, fail_fast=True)
    min_tokens: Whole = Field(0, ge=0)
    ignore_eos: bool = False
    n: Whole = Field(1, ge=1, le=16)
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, min_length=1)
    ragcache: Extension = Extension()

    @model_validator(mode="after")
    def _consistent(self) -> CompletionFields:
        if self.stream_options and not self.stream:
            raise InvalidRequest("stream_options: only allowed with stream", param="stream_options")
        return self

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """Most tokens to generate for a choice, None for all that fit."""

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """How many log-probabilities to report beside each token's own, None for none at all."""

    @abstractmethod
    def prompts(self) -> Sequence[ChatPrompt | str | tuple[int, ...]]:
        """The prompts; each becomes a generation of its own."""

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def requests(self, request_id: str, tenant: str) -> list[GenerateRequest]:
        """One request for each prompt; the first carries `request_id`, the others a suffix."""
        sampling = self._sampling()
        return [
            GenerateRequest(
                id=f"{request_id}-{i}" if i else request_id,
                prompt=prompt,
                sampling=sampling,
                stop=tuple(self.stop),
                tenant=tenant,
                cache_salt=self.cache_salt,
                previous_id=self.ragcache.previous_id,
            )
            for i, prompt in enumerate(self.prompts())
        ]

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.limit,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            logprobs=self.alternatives,
            stop_token_ids=frozenset(self.stop_token_ids),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            n=self.n,
        )
