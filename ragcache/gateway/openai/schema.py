"""What clients send to OpenAI's two completion routes, checked and made into `GenerateRequest`s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ragcache.errors import InvalidRequest
from ragcache.gateway.fields import WHOLE, Harmless, MessageList
from ragcache.gateway.openai.cache import CacheFields
from ragcache.gateway.openai.fields import UNSUPPORTED, CompletionFields, Limit
from ragcache.gateway.openai.messages import ChatMessage
from ragcache.gateway.openai.output import ResponseFormat
from ragcache.gateway.openai.tools import ToolFields
from ragcache.types import Breakpoint, ChatPrompt, GenerateRequest, OutputRules

MAX_PROMPTS = 64  # of one completions request; more of them would only queue behind each other

_NOT_OF_CHATS: Harmless = {"echo": (False,), "suffix": ("",), "best_of": (1,)}
_NOT_OF_TEXTS: Harmless = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "best_of": (1,),
}


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


Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
]


class ChatCompletionRequest(CompletionFields, ToolFields, CacheFields):
    """Body of POST /v1/chat/completions; `max_tokens` 0 only writes the cache.

    `user`, `safety_identifier`, `metadata`, `store`, `service_tier`, `reasoning_effort` and
    `verbosity` are tolerated like unknown fields: nothing depends on them.
    """

    unsupported: ClassVar[Harmless] = {**UNSUPPORTED, **_NOT_OF_CHATS}

    messages: MessageList[ChatMessage] = Field(min_length=1)
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    response_format: ResponseFormat = ResponseFormat(type="text")
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    chat_template_kwargs: dict[str, Any] = Field({})

    @model_validator(mode="after")
    def _logprobs_first(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: requires logprobs", param="top_logprobs")
        return self

    @property
    def limit(self) -> int | None:
        """The newer field wins."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def alternatives(self) -> int | None:
        """`top_logprobs`, 0 when only `logprobs` was asked for."""
        return self.top_logprobs or 0 if self.logprobs else None

    def prompts(self) -> list[ChatPrompt]:
        """The conversation."""
        return [
            ChatPrompt(
                messages=tuple(message.message() for message in self.messages),
                tools=tuple(tool.definition() for tool in self.tools),
                template_options=self.chat_template_kwargs,
                breakpoints=self.breakpoints(self._explicit(), last=len(self.messages) - 1),
            )
        ]

    def requests(self, request_id: str, tenant: str) -> list[GenerateRequest]:
        """The one request, with what its output may be."""
        rules = OutputRules(
            tool_choice=self.choice.mode,
            allowed_tools=self.choice.names,
            parallel_tool_calls=self.several_calls,
            schema=self.response_format.enforced,
        )
        (request,) = super().requests(request_id, tenant)
        return [replace(request, output=rules, explicit_caching=self.explicit_caching)]

    def _explicit(self) -> Iterator[Breakpoint]:
        yield from self.tool_breakpoints()
        for index, message in enumerate(self.messages):
            yield from message.breakpoints(index, self.explicit_ttl)


class CompletionRequest(CompletionFields):
    """Body of POST /v1/completions; `max_tokens` 0 only writes the cache, or echoes."""

    unsupported: ClassVar[Harmless] = {**UNSUPPORTED, **_NOT_OF_TEXTS}

    prompt: Prompts = Field(min_length=1)
    max_tokens: Limit = 16
    logprobs: Annotated[int, Field(ge=0, le=5), WHOLE] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _explainable(self) -> CompletionRequest:
        if self.ragcache.explain and len(self.prompt) > 1:
            param = "ragcache.explain"
            raise InvalidRequest(f"{param}: only with one prompt", param=param)
        return self

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

    def requests(self, request_id: str, tenant: str) -> list[GenerateRequest]:
        """One request for each prompt; what is echoed has log-probabilities too."""
        requests = super().requests(request_id, tenant)
        if not self.echo:
            return requests
        sampling = replace(requests[0].sampling, prompt_logprobs=self.logprobs)
        return [replace(request, sampling=sampling, echo=True) for request in requests]
