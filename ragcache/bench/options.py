"""The options of every benchmark, importable without the libraries that the benchmarks need."""

from __future__ import annotations

import importlib
import json
import secrets
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Json,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    field_validator,
    model_validator,
)
from rich.console import Console

from ragcache.config import BaseUrl, DtypeName, QuantizationName
from ragcache.errors import RagcacheError

OURS = "ragcache"  # its name in comparisons


class BenchFailed(RagcacheError):
    """A benchmark found something broken."""


class BenchOptions(BaseModel):
    """A benchmark as a command: `module` has `run(options)` and `render(results)`."""

    model_config = ConfigDict(extra="forbid")
    module: ClassVar[str]

    json_file: Path | None = Field(
        None, validation_alias="json", description="also write all figures to this file"
    )

    def cli_cmd(self) -> None:
        """Run, show the figures and write them where asked."""
        bench: Any = importlib.import_module(f"ragcache.bench.{self.module}")
        results: dict[str, Any] = bench.run(self)
        Console().print(bench.render(results))
        if self.json_file is not None:
            self.json_file.write_text(json.dumps(results, indent=2) + "\n")
        if violations := results.get("violations"):
            raise BenchFailed(f"{len(violations)} things that must not happen did")


class ChaosBench(BenchOptions):
    """Send random requests on both wires, some of which leave, and check that nothing breaks."""

    module = "chaos.command"

    url: str | None = Field(
        None, description="base URL of a server's API; default: an own gateway with a tiny model"
    )
    model: str | None = Field(None, description="model to ask for; default: the first one listed")
    requests: PositiveInt = Field(10_000, description="requests in all")
    concurrency: PositiveInt = Field(24, description="requests in flight")
    leaving: float = Field(0.2, ge=0, le=1, description="share of the requests that leave early")
    compared: int = Field(50, ge=0, description="answers that are asked for again, alone")
    seed: int = Field(0, description="of the requests")


class PrefixBench(BenchOptions):
    """Time the prefix cache alone: no model, no network."""

    module = "prefix"


class EngineBench(BenchOptions):
    """Time decode steps and prefill chunks against plain transformers, as ratios."""

    module = "engine"

    model: str | None = Field(None, description="hub id, folder or GGUF file; default: embedded")
    dtype: DtypeName = Field("auto", description="of weights and KV")
    repeats: PositiveInt = Field(9, description="rounds of each case; medians are shown")
    max_step_time: PositiveFloat = Field(
        0.5, description="seconds of a step beside a stream, as in `ragcache serve`"
    )


class KernelsBench(BenchOptions):
    """Time one layer's attention: paged, over shared prefixes, in chunks; as ratios to controls."""

    module = "kernels"

    batch: PositiveInt = Field(16, description="sequences that decode")
    shared: PositiveInt = Field(2048, description="tokens of their common prefix")
    own: PositiveInt = Field(128, description="tokens behind it")
    heads: PositiveInt = Field(32, description="query heads")
    kv_heads: PositiveInt = Field(8, description="KV heads")
    head_dim: PositiveInt = Field(128, description="elements of a head")
    dtype: DtypeName = Field("auto", description="of queries and KV")
    repeats: PositiveInt = Field(20, description="rounds of each case; medians are shown")

    @model_validator(mode="after")
    def _heads_in_groups(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError("heads must be a multiple of kv_heads")
        return self


class GatewayBench(BenchOptions):
    """Time requests to a gateway whose model takes no time."""

    module = "gateway"

    requests: PositiveInt = Field(200, description="requests, one after the other")
    words: PositiveInt = Field(700, description="words in the prompt that all requests share")


class LangchainBench(BenchOptions):
    """Time what LangChain's chat model adds to the bare engine, in process and over HTTP."""

    module = "langchain"

    calls: PositiveInt = Field(200, description="calls of each kind, one after the other")
    words: PositiveInt = Field(1000, description="words in the prompt that all calls share")
    tokens: PositiveInt = Field(32, description="tokens of a streamed answer")


class QualityBench(BenchOptions):
    """Measure what quantised weights lose: perplexity, other tokens, divergence."""

    module = "quality"

    model: str | None = Field(None, description="hub id, folder or GGUF file; default: embedded")
    dtype: DtypeName = Field("auto", description="of what is not quantised, and of the control")
    quantization: QuantizationName = Field("int8", description="as of `serve`")
    text: Path | None = Field(None, description="file to read; default: made-up prose")
    tokens: int = Field(512, ge=2, description="of the text, from its beginning on")
    seed: int = Field(0, description="of the prose")


class ReportBench(BenchOptions):
    """Measure what paging and sharing gain, with controls, and write it as a page with plots."""

    module = "report.command"

    output: Path = Field(Path("ragcache-report.html"), description="file for the page")
    model: str | None = Field(None, description="hub id, folder or GGUF file; default: embedded")
    requests: PositiveInt = Field(4, description="timed requests for each length of the prefix")
    seed: int = Field(0, description="of lengths, prompts and agents")


class ScalingBench(BenchOptions):
    """Time how a token's cost grows with context, batch and new tokens: a table and a plot."""

    module = "scaling.command"

    output: Path = Field(Path("ragcache-scaling.html"), description="file for the page with plots")
    model: str | None = Field(None, description="hub id, folder or GGUF file; default: embedded")
    dtype: DtypeName = Field("auto", description="of weights and KV")
    contexts: list[PositiveInt] = Field(
        [1024, 4096, 8192], min_length=1, description="tokens that a decode step reads of each"
    )
    batches: list[PositiveInt] = Field(
        [1, 2, 4, 8, 16], min_length=1, description="sequences in a decode step"
    )
    prompt: PositiveInt = Field(4096, description="tokens of a prompt, of which more and more new")
    repeats: PositiveInt = Field(3, description="rounds of each prompt; medians are shown")


class ServeBench(BenchOptions):
    """Load a running server with agents that share prompts: hit rate, latency, throughput."""

    module = "serve"

    url: str = Field("http://127.0.0.1:8000/v1", description="base URL of the server's API")
    model: str | None = Field(None, description="model to ask for; default: the first one listed")
    api_key: SecretStr | None = Field(None, description="sent as a bearer token")
    concurrency: PositiveInt = Field(4, description="requests in flight")
    sessions: PositiveInt = Field(8, description="conversations, all alive at once")
    turns: PositiveInt = Field(4, description="requests of each conversation")
    passages: PositiveInt = Field(3, description="passages retrieved for each turn")
    max_tokens: PositiveInt = Field(32, description="longest answer, in tokens")
    ignore_eos: bool = Field(False, description="always generate max_tokens, if the server can")
    seed: int = Field(0, description="of the workload; the same seed sends the same requests")
    block_size: PositiveInt = Field(16, description="tokens in a block of the ideal cache")
    tokenizer: str | None = Field(
        None, description="hub id, folder or GGUF file of the model; default: the embedded model"
    )
    salt: bool = Field(
        True, description="start cold by a cache_salt; off for servers that refuse the field"
    )
    control: bool = Field(False, description="run again with nothing shared, to compare with")
    probe_tokens: int = Field(
        1400, ge=0, description="prompt length of the cold and warm probe; 0: no probe"
    )
    probe_repeats: PositiveInt = Field(3, description="rounds of the probe; medians are shown")

    @model_validator(mode="after")
    def _control_needs_salt(self) -> Self:
        if self.control and not self.salt:
            raise ValueError("control needs salt: it keeps requests from sharing by salting each")
        return self


class CompareBench(BenchOptions):
    """Play the same agents against ragcache and other servers, turn and turn about; as ratios."""

    module = "compare"

    url: str = Field("http://127.0.0.1:8000/v1", description="base URL of ragcache's API")
    peer: dict[str, BaseUrl] = Field(
        ..., min_length=1, description="NAME=URL of another server's API; repeat for more"
    )
    api_key: SecretStr | None = Field(None, description="sent to all of them as a bearer token")
    concurrency: list[PositiveInt] = Field(
        [1, 4, 8], min_length=1, description="requests in flight, in several runs"
    )
    rounds: PositiveInt = Field(3, description="of all servers, each with new text; for medians")
    sessions: PositiveInt = Field(8, description="conversations, all alive at once")
    turns: PositiveInt = Field(4, description="requests of each conversation")
    passages: PositiveInt = Field(3, description="passages retrieved for each turn")
    max_tokens: PositiveInt = Field(32, description="longest answer, in tokens")
    extra: Json[dict[str, Any]] = Field(
        {}, description="merged into every request's body, such as '{\"ignore_eos\": true}'"
    )
    request_timeout: PositiveFloat = Field(600, description="seconds until a request has failed")
    seed: int = Field(
        default_factory=lambda: secrets.randbelow(2**31),
        description="of the text; default: another one in every run, so that no cache has it",
    )

    @field_validator("peer")
    @classmethod
    def _names_of_their_own(cls, peer: dict[str, str]) -> dict[str, str]:
        if OURS in peer:
            raise ValueError(f"{OURS} is the server at url; give the peer another name")
        return peer


class RoutingBench(BenchOptions):
    """Simulate routed replicas against one node with the memory of all of them: hit rates."""

    module = "routing"

    trace: Path | None = Field(
        None, description="requests in Mooncake's JSONL form; default: generated ones"
    )
    replicas: PositiveInt = Field(8, description="replicas, each with a prefix cache")
    blocks: PositiveInt = Field(4000, description="blocks of 512 tokens in each replica's cache")
    gateways: list[PositiveInt] = Field([1, 2, 4, 8], description="routers, in several runs")
    lags: list[Annotated[float, Field(ge=0)]] = Field(
        [0, 1, 10], description="seconds that the routers' knowledge is old, in several runs"
    )
    rate: PositiveFloat = Field(4.0, description="generated requests a second")
    seconds: PositiveFloat = Field(1800.0, description="for how long they are generated")
    seed: int = Field(0, description="of arrivals and of what is generated")
