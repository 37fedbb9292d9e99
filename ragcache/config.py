"""Every option, once: as a flag, as a RAGCACHE_* variable and as a TOML key.

Flags win over the environment, the environment over the file, the file over the defaults.
An unknown name is an error in each of the three.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ByteSize,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    CliPositionalArg,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ragcache.errors import ConfigError

ENV_PREFIX = "RAGCACHE_"
CONFIG_FILE = "RAGCACHE_CONFIG"
BaseUrl = Annotated[str, Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$")]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
QuantizationName = Literal["int8"]
# Not options of the server: of clients, and the instruction set of the C kernels.
OTHER_VARIABLES = {CONFIG_FILE, "RAGCACHE_BASE_URL", "RAGCACHE_ISA"}


class ServerSettings(BaseSettings):
    """What every server has, whatever stands behind it."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    max_body_size: ByteSize = Field(
        ByteSize(64 * 2**20), description="largest request body; beyond: 413"
    )
    api_key: Annotated[list[str], NoDecode] = Field(
        [],
        description="accepted KEY, or TENANT:KEY; repeat for more; each tenant, and each key "
        "without one, has a cache of its own",
    )
    api_keys_file: Path | None = Field(None, description="file with one such key on each line")
    drain_timeout: NonNegativeFloat = Field(
        30, description="seconds that running requests get after a stop signal"
    )
    redis_url: str | None = Field(
        None,
        description="Redis or Valkey through which replicas know of each other: redis://, "
        "rediss://, unix://, redis+sentinel:// or redis+cluster://",
    )
    cluster_name: str = Field(
        "default", pattern=r"^[\w.-]+$", description="replicas with the same name know each other"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="of logs")
    log_format: Literal["text", "json"] = Field("text", description="of logs")
    otel: bool = Field(
        False,
        description="send a span of each request by OTLP over HTTP; the standard OTEL_* variables "
        "say where; needs the extra otel",
    )

    @model_validator(mode="before")
    @classmethod
    def _known_variables(cls, values: Any) -> Any:
        known = _variables() | OTHER_VARIABLES
        for name in os.environ:
            if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
                near = difflib.get_close_matches(name.upper(), known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"unknown environment variable {name}{hint}")
        return values

    @field_validator("served_model_name", "api_key", "replica", mode="before", check_fields=False)
    @classmethod
    def _separated_by_commas(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then the file that RAGCACHE_CONFIG names."""
        sources = (init_settings, env_settings)
        path = os.environ.get(CONFIG_FILE)
        if path is None:
            return sources
        if not Path(path).is_file():
            raise ConfigError(f"{CONFIG_FILE}: no file at {path}")
        try:
            return (*sources, TomlConfigSettingsSource(settings_cls, Path(path)))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{CONFIG_FILE}: {path}: {error}") from error


class ServeSettings(ServerSettings):
    """Serve a model with a shared prefix cache over an OpenAI-compatible API."""

    model: CliPositionalArg[str | None] = Field(
        None, description="hub id, local folder or GGUF file; default: the embedded small model"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    dtype: DtypeName = Field(
        "auto", description="of the weights; auto: bfloat16 where the hardware is fast at it"
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto",
        description="of cached keys and values; auto: the model's; on a GPU, fp8 takes sm_89",
    )
    quantization: QuantizationName | None = Field(
        None,
        description="on a CPU, multiply in int8: faster and smaller, and not the same answers; "
        "`ragcache bench quality` tells what is lost; default: none",
    )
    tensor_parallel_size: PositiveInt = Field(
        1, description="ranks that share each layer's heads: one GPU each, or processes on a CPU"
    )
    served_model_name: Annotated[list[str], NoDecode] = Field(
        [], description="name in the API; repeat for aliases; default: the model's name"
    )
    block_size: PositiveInt = Field(16, description="tokens in a KV block")
    kv_cache_blocks: PositiveInt | None = Field(None, description="size of the KV pool in blocks")
    kv_cache_memory: ByteSize | None = Field(
        None,
        description="size of each rank's KV pool, such as 4GiB; default: a share of free memory",
    )
    host_cache_memory: ByteSize | None = Field(
        None,
        description="host memory, such as 8GiB, for blocks that the KV pool evicts; they come back "
        "where that is cheaper than computing them; default: none",
    )
    max_model_len: PositiveInt | None = Field(
        None, description="prompt and output tokens of one request; default: the model's"
    )
    max_batch_tokens: PositiveInt = Field(512, description="tokens computed in one step")
    max_step_time: PositiveFloat | None = Field(
        None,
        description="seconds to which prefill may stretch a step while other requests wait for "
        "their next tokens; default: 0.5 on a CPU, no limit on a GPU",
    )
    speculative_tokens: NonNegativeInt = Field(
        8,
        description="most tokens that a step tries ahead for a request whose own context suggests "
        "them, where that cannot change an answer: on a CPU, with the C kernels; 0: none",
    )
    max_running: PositiveInt = Field(32, description="choices computed at the same time")
    max_queue: PositiveInt = Field(128, description="requests that may wait; beyond: 429")
    max_requests_per_tenant: PositiveInt | None = Field(
        None, description="of one API key or tenant, running and waiting; beyond: 429"
    )
    queue_timeout: PositiveFloat = Field(
        60, description="seconds that a request may wait before it begins; then: 503"
    )
    request_timeout: PositiveFloat = Field(
        600, description="seconds that a request may take in all; then: 504, or an error event"
    )
    max_string_length: PositiveInt | None = Field(
        None,
        description="characters of a JSON string whose schema sets no limit, in tool calls and "
        "structured output; default: 200 for the embedded model, which repeats itself, else none",
    )
    advertise_url: BaseUrl | None = Field(
        None,
        description="where others reach this replica; default: http://HOST:PORT, with the "
        "machine's name where HOST is every address",
    )
    cuda_graphs: bool = Field(True, description="on a GPU, record and replay decode steps")
    prefix_caching: bool = Field(True, description="share KV between requests")
    metrics_compat: Literal["vllm"] | None = Field(
        None, description="show metrics under these names, too"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kv_cache_blocks and self.kv_cache_memory:
            raise ValueError("give kv_cache_blocks or kv_cache_memory, not both")
        if self.host_cache_memory is not None and not self.prefix_caching:
            raise ValueError("host_cache_memory needs prefix_caching")
        if self.quantization is not None and self.tensor_parallel_size > 1:
            raise ValueError("quantization is for one rank")
        if self.max_running > self.max_batch_tokens:
            raise ValueError("max_running must not exceed max_batch_tokens")
        if self.redis_url and not self.port and not self.advertise_url:
            raise ValueError("redis_url needs advertise_url where the port is picked at random")
        return self


class RouteSettings(ServerSettings):
    """Forward to replicas of a server, each request to the one that suits it best."""

    model: CliPositionalArg[str | None] = Field(
        None,
        description="the model that the replicas serve, for its tokenizer: hub id, local folder or "
        "GGUF file; default: the embedded small model",
    )
    replica: Annotated[list[BaseUrl], NoDecode] = Field(
        [], description="base URL of a replica that Redis does not name; repeat for more"
    )
    max_requests: PositiveInt = Field(
        1000, description="requests under way, each with its body in memory; beyond: 429"
    )

    @model_validator(mode="after")
    def _somewhere_to_go(self) -> Self:
        if not self.replica and self.redis_url is None:
            raise ValueError("give redis_url, or replica at least once")
        return self


def _variables() -> set[str]:
    """Those of all servers: they may stand in one environment."""
    fields = ServeSettings.model_fields.keys() | RouteSettings.model_fields.keys()
    return {ENV_PREFIX + name.upper() for name in fields}
