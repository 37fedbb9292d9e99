"""What clients send to OpenAI's two completion routes, checked and made into `GenerateRequest`s.

Fields and ranges follow OpenAI's API reference; `top_k`, `min_p`, `repetition_penalty`,
`min_tokens`, `ignore_eos`, `stop_token_ids`, `cache_salt` and `chat_template_kwargs` are the
usual extensions of open servers. Unknown fields are tolerated; known ones that ask for something
we do not do are refused, unless their value asks for nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ragcache.errors import InvalidRequest
from ragcache.types import ChatPrompt, GenerateRequest, Message, SamplingParams

# field → values that ask for nothing, besides null
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}

MAX_PROMPTS = 64  # of one completions request; more of them would only queue behind each other
MAX_TOKEN_IDS = 1024  # in a logit_bias or stop_token_ids: each costs time in every step


def _whole(value: Any) -> Any:
    """1e12 and 5.0 are integers in JSON Schema; True and "5" are not."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _joined(content: Any) -> Any:
    """Text parts as one string, so that both forms render to the same tokens."""
    return "".join(map(_text, content)) if isinstance(content, list) else content


def _text(part: Any) -> str:
    fields = part if isinstance(part, dict) else {}
    if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
        kind = fields.get("type", type(part).__name__)
        raise PydanticCustomError(
            "content_part", "a content part of type {kind} is not supported", {"kind": repr(kind)}
        )
    return str(fields["text"])


def _prompts(value: Any) -> Any:
    """A string or a list of token ids is one prompt, a list of either is several."""
    single = isinstance(value, str) or (isinstance(value, list) and _is_ids(value))
    prompts = [value] if single else value
    if not isinstance(prompts, list) or not all(isinstance(p, str) or _is_ids(p) for p in prompts):
        raise PydanticCustomError(
            "prompt", "must be a string, a list of strings, token ids, or a list of lists of those"
        )
    if len(prompts) > MAX_PROMPTS:
        raise PydanticCustomError("prompt", f"must not hold more than {MAX_PROMPTS} prompts")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
StopString = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class StreamOptions(_Strict):
    """`stream_options` of both routes."""

    include_usage: bool = False


class ChatMessage(_Strict):
    """One message of a conversation; its content becomes one string."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    content: Annotated[str | None, BeforeValidator(_joined)] = Field(None, validate_default=True)

    @field_validator("content")
    @classmethod
    def _needed(cls, content: str | None, info: ValidationInfo) -> str | None:
        calls = info.data.get("role") == "assistant" and info.data.get("tool_calls")
        if content is None and not calls:
            raise PydanticCustomError("content", "is required, except beside tool_calls")
        return content

    def message(self) -> Message:
        """The shared form of this message."""
        return Message(
            role=self.role,
            content=self.content or "",
            name=self.name,
            tool_calls=tuple(self.tool_calls or ()),
            tool_call_id=self.tool_call_id,
        )


class CompletionFields(_Strict, ABC):
    """What both routes have in common."""

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Whole = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: Whole | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] = Field(
        {}, max_length=MAX_TOKEN_IDS
    )
    stop: Annotated[list[StopString], BeforeValidator(_listed)] = Field([], max_length=4)
    stop_token_ids: Annotated[list[Whole], FailFast()] = Field([], max_length=MAX_TOKEN_IDS)
    min_tokens: Whole = Field(0, ge=0)
    ignore_eos: bool = False
    n: Whole = Field(1, ge=1, le=16)
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, body: Any) -> Any:
        """Take null for "not given", as OpenAI does, and refuse what we cannot do."""
        if not isinstance(body, dict):
            raise PydanticCustomError("object", "the request body must be a JSON object")
        given = {name: value for name, value in body.items() if value is not None}
        for name, harmless in UNSUPPORTED.items():
            if name in given and given[name] not in harmless:
                raise InvalidRequest(f"{name}: this value is not supported", param=name)
        return given

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


class ChatCompletionRequest(CompletionFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Whole | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _logprobs_first(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: requires logprobs", param="top_logprobs")
        return self

    @property
    def limit(self) -> int | None:
        """The newer field wins."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """`top_logprobs`, 0 when only `logprobs` was asked for."""
        return self.top_logprobs or 0 if self.logprobs else None

    def prompts(self) -> list[ChatPrompt]:
        """The conversation."""
        messages = tuple(message.message() for message in self.messages)
        return [ChatPrompt(messages, template_options=self.chat_template_kwargs)]


class CompletionRequest(CompletionFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)] = Field(min_length=1)
    max_tokens: Count = 16
    logprobs: Whole | None = Field(None, ge=0, le=5)

    @property
    def limit(self) -> int:
        """OpenAI's default is 16 here."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """The legacy field is the number itself."""
        return self.logprobs

    def prompts(self) -> list[str | tuple[int, ...]]:
        """Texts, or token ids."""
        return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in self.prompt]
