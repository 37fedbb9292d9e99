"""What a chat model is told, once or for one call, and the request that comes of it."""

from __future__ import annotations

import difflib
import hashlib
import os
from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.utils import secret_from_env
from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from langchain_ragcache.messages import wire_messages
from langchain_ragcache.structured_output import response_format

Json = dict[str, Any]

_SENT = (  # the options that are fields of the request
    "temperature",
    "top_p",
    "max_tokens",
    "seed",
    "cache_control",
    "cache_salt",
    "prompt_cache_key",
    "prompt_cache_options",
)
_OF_THE_CLIENT = ("api_key", "default_headers", "max_retries", "timeout")
_ALIASES = {"model_name": "model", "stop_sequences": "stop"}
_FIELDS = {  # of one call; whatever else a gateway may know goes through extra_body
    *_SENT,
    "chat_template_kwargs",
    "extra_body",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "metadata",
    "min_p",
    "min_tokens",
    "model",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "prompt_cache_retention",
    "repetition_penalty",
    "response_format",
    "stop",
    "stop_token_ids",
    "tool_choice",
    "tools",
    "top_k",
    "top_logprobs",
    "user",
}


class Options(BaseChatModel, ABC):
    """The fields of `ChatRagcache`; it holds neither connections nor an engine of its own."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, arbitrary_types_allowed=True)

    model: str | None = Field(default=None, alias="model_name")
    """A served name; embedded, a hub id, folder or GGUF file. Default: whatever is served."""
    base_url: str | None = None
    """Such as http://127.0.0.1:8000, with /v1 or without; None for the embedded engine. Default:
    `RAGCACHE_BASE_URL`, unless there is an `engine`, or options for one."""
    api_key: SecretStr | None = Field(
        default_factory=secret_from_env("RAGCACHE_API_KEY", default=None)
    )
    """Of the gateway; each key has a cache of its own."""
    default_headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """Sent with every request."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Embedded, the options of `ragcache serve`: {"kv_cache_memory": "2GiB", …}."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """A `ragcache.embedded.EmbeddedGateway` to use instead of loading one."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds for a whole call with its retries."""
    max_retries: int = Field(default=2, ge=0)
    """How often what may pass (429, 503, a lost connection) is tried again."""
    streaming: bool = False
    """Whether `invoke` streams behind the scenes, for callbacks that want every token."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    extra_body: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Other fields of the request, such as `top_k` or `min_p`."""

    cache_control: dict[str, Any] | None = None
    """Anthropic's marker at the end of the prompt: {"type": "ephemeral", "ttl": "1h"}."""
    cache_salt: SecretStr | None = None
    """Requests with different salts share nothing."""
    prompt_cache_key: str | None = None
    """Calls with the same key go to the same replica."""
    prompt_cache_options: dict[str, Any] | None = None
    """OpenAI's {"mode": "explicit"}, {"ttl": "1h"} …"""
    stable_tool_order: bool = True
    """Whether `bind_tools` sorts by name: the same tools in another order would be a miss."""

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "http://none")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be a URL such as http://127.0.0.1:8000")
        if "@" in parts.netloc:
            raise ValueError("must hold no user or password: use api_key or default_headers")
        return url or None

    @field_validator("default_headers")
    @classmethod
    def _fit_for_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for text in (*headers, *headers.values()):
            _refuse_controls(text)
        return headers

    @field_validator("api_key")
    @classmethod
    def _fits_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        _refuse_controls(key.get_secret_value() if key else "")
        return key

    @field_validator("engine_options")
    @classmethod
    def _not_said_elsewhere(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in ("model", "api_key", "host", "port"):
            if name in options:
                raise ValueError(f"{name} is no option of an engine in this process")
        return options

    @model_validator(mode="after")
    def _in_one_place(self) -> Self:
        here = self.engine is not None or bool(self.engine_options)
        if here and self.base_url:
            raise ValueError("base_url: an engine in this process has none; give one of the two")
        if not here and "base_url" not in self.model_fields_set:
            self.base_url = self._is_url(os.environ.get("RAGCACHE_BASE_URL"))
        return self

    def _for_call(self, call: Mapping[str, Any]) -> tuple[Self, Json]:
        """The model with those options of a call that are the client's, and the other ones.

        Raises ValueError for an option that does not exist.
        """
        named = {_ALIASES.get(name, name): value for name, value in call.items()}
        client = {name: named.pop(name) for name in _OF_THE_CLIENT if name in named}
        for name in named.keys() - _FIELDS:
            near = difflib.get_close_matches(name, {*_FIELDS, *_OF_THE_CLIENT}, n=1)
            hint = f"did you mean {near[0]}?" if near else "extra_body takes other fields"
            raise ValueError(f"{name}: there is no such option of a call; {hint}")
        if not client:
            return self, named
        return self.model_copy(update=client), named

    def _headers(self) -> dict[str, str]:
        if self.api_key is None:
            return self.default_headers
        return {"Authorization": f"Bearer {_told(self.api_key)}", **self.default_headers}

    def _body(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, call: Mapping[str, Any]
    ) -> Json:
        """The request; what the call says wins over the options, `extra_body` over both."""
        fields = _given({name: getattr(self, name) for name in _SENT}) | self.extra_body
        fields |= _given(call) | dict(call.get("extra_body") or {})
        fields.pop("extra_body", None)
        if "cache_salt" in fields:
            fields["cache_salt"] = _told(fields["cache_salt"])
        if not fields.get("tools", True):
            del fields["tools"]
        if wanted := fields.get("response_format"):
            fields["response_format"] = response_format(wanted)
        if stops := stop if stop is not None else fields.pop("stop", self.stop):
            fields["stop"] = stops
        return {"messages": wire_messages(messages), "ragcache": {"explain": True}, **fields}

    @property
    def _identifying_params(self) -> Json:
        """What an answer depends on, for LangChain's caches and traces; secrets only as a hash."""
        names = [*_SENT, "base_url", "engine_options", "extra_body", "model", "stop"]
        shown = {name: getattr(self, name) for name in names if name != "cache_salt"}
        if self.engine is not None:
            shown["engine"] = self.engine.fingerprint
        secrets = (self._headers(), _told(self.cache_salt))
        return {**shown, "tenant": hashlib.sha256(repr(secrets).encode()).hexdigest()[:16]}


def _refuse_controls(text: str) -> None:
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ValueError("must hold no control characters")


def _told(secret: SecretStr | str | None) -> str | None:
    """What it is; `model_copy(update=…)` and options of a call may bring it as a string."""
    return secret.get_secret_value() if isinstance(secret, SecretStr) else secret


def _given(fields: Mapping[str, Any]) -> Json:
    return {name: value for name, value in fields.items() if value is not None}
