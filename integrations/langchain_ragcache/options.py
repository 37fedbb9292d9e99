"""What a chat model is told once, and the request that comes of it."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.utils import from_env, secret_from_env
from pydantic import ConfigDict, Field, SecretStr

from langchain_ragcache.embedded import GivenEngine
from langchain_ragcache.gateways import Gateway, gateways
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


class Options(BaseChatModel, ABC):
    """The fields of `ChatRagcache`; it holds neither connections nor an engine of its own."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, arbitrary_types_allowed=True)

    model: str | None = Field(default=None, alias="model_name")
    """A served name; embedded, a hub id, folder or GGUF file. Default: whatever is served."""
    base_url: str | None = Field(default_factory=from_env("RAGCACHE_BASE_URL", default=None))
    """Such as http://127.0.0.1:8000, with /v1 or without; None for the embedded engine."""
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
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Other fields of the request, such as `top_k` or `min_p`."""

    cache_control: dict[str, Any] | None = None
    """Anthropic's marker at the end of the prompt: {"type": "ephemeral", "ttl": "1h"}."""
    cache_salt: str | None = None
    """Requests with different salts share nothing."""
    prompt_cache_key: str | None = None
    """Calls with the same key go to the same replica."""
    prompt_cache_options: dict[str, Any] | None = None
    """OpenAI's {"mode": "explicit"}, {"ttl": "1h"} …"""
    stable_tool_order: bool = True
    """Whether `bind_tools` sorts by name: the same tools in another order would be a miss."""

    def _gateway(self) -> Gateway:
        if self.base_url:
            return gateways.http(self.base_url, self._headers())
        if self.engine is not None:
            return GivenEngine(self.engine)
        return gateways.embedded(self.model, self.engine_options)

    def _headers(self) -> dict[str, str]:
        if self.api_key is None:
            return self.default_headers
        key = self.api_key.get_secret_value()
        return {"Authorization": f"Bearer {key}", **self.default_headers}

    def _body(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, call: Mapping[str, Any]
    ) -> Json:
        """The request without its model; what the call says wins over the options."""
        own = {name: getattr(self, name) for name in _SENT}
        merged = _given(own) | self.extra_body | _given(call) | dict(call.get("extra_body") or {})
        merged.pop("extra_body", None)
        if not merged.get("tools", True):
            del merged["tools"]
        if wanted := merged.get("response_format"):
            merged["response_format"] = response_format(wanted)
        if stops := self.stop if stop is None else stop:
            merged["stop"] = stops
        return {"messages": wire_messages(messages), "ragcache": {"explain": True}, **merged}


def _given(fields: Mapping[str, Any]) -> Json:
    return {name: value for name, value in fields.items() if value is not None}
