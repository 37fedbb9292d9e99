"""The same observations under vLLM's names, for dashboards and tools that know only those.

Names, types and labels (`model_name`, `engine` and those below) are those of vLLM 0.33.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

Labels = Mapping[str, str]
Relabel = Callable[[Labels], Labels | None]


def _dropped(_: Labels) -> Labels | None:
    return {}


def _constant(**labels: str) -> Relabel:
    return lambda _: labels


def _only(label: str, *values: str) -> Relabel:
    return lambda labels: {} if labels[label] in values else None


def _mapped(label: str, name: str, values: Labels) -> Relabel:
    return lambda labels: {name: values[labels[label]]} if labels[label] in values else None


def _http(labels: Labels) -> Labels | None:
    handler = _HANDLERS[labels["api"]]
    return {"method": "POST", "handler": handler, "status": f"{labels['status'][0]}xx"}


@dataclass(frozen=True, slots=True)
class Alias:
    """A name of vLLM's for one of our families.

    `labels` gives the labels that a sample of ours has there, beside the model's and the engine's,
    or None to leave it out; samples with equal ones are added up.
    """

    name: str
    source: str
    labels: Relabel = _dropped


_HANDLERS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
}
_SOURCES = {
    "computed": "local_compute",
    "device": "local_cache_hit",
    "host": "external_kv_transfer",
}
_FINISHED = {
    "stop": "stop",
    "tool_calls": "stop",
    "length": "length",
    "context": "length",
    "abort": "abort",
}

ALIASES = (
    Alias("vllm:num_requests_running", "requests_running"),
    Alias("vllm:num_requests_waiting", "requests_waiting"),
    Alias("vllm:num_requests_waiting_by_reason", "requests_waiting", _constant(reason="capacity")),
    Alias("vllm:kv_cache_usage_perc", "kv_usage_ratio"),
    Alias("vllm:num_preemptions", "preemptions"),
    Alias("vllm:prompt_tokens", "prompt_tokens"),
    Alias(
        "vllm:prompt_tokens_by_source",
        "prompt_tokens_by_source",
        _mapped("source", "source", _SOURCES),
    ),
    Alias(
        "vllm:prompt_tokens_cached", "prompt_tokens_by_source", _only("source", "device", "host")
    ),
    Alias(
        "vllm:prompt_tokens_cached_by_source",
        "prompt_tokens_by_source",
        _mapped("source", "source", {"device": "device", "host": "host"}),
    ),
    # What the device does not have is looked for on the host.
    Alias("vllm:prefix_cache_queries", "prompt_tokens_by_source"),
    Alias("vllm:prefix_cache_hits", "prompt_tokens_by_source", _only("source", "device")),
    Alias(
        "vllm:external_prefix_cache_queries",
        "prompt_tokens_by_source",
        _only("source", "computed", "host"),
    ),
    Alias("vllm:external_prefix_cache_hits", "prompt_tokens_by_source", _only("source", "host")),
    Alias("vllm:generation_tokens", "generation_tokens"),
    Alias("vllm:spec_decode_num_draft_tokens", "draft_tokens"),
    Alias("vllm:spec_decode_num_accepted_tokens", "accepted_draft_tokens"),
    Alias(
        "vllm:request_success", "requests", _mapped("finish_reason", "finished_reason", _FINISHED)
    ),
    Alias(
        "vllm:admission_rejections",
        "request_errors",
        _mapped("error_type", "reason", {"Overloaded": "queue_full"}),
    ),
    Alias("vllm:time_to_first_token_seconds", "time_to_first_token_seconds"),
    Alias("vllm:inter_token_latency_seconds", "inter_token_latency_seconds"),
    Alias("vllm:request_time_per_output_token_seconds", "request_time_per_output_token_seconds"),
    Alias("vllm:e2e_request_latency_seconds", "request_e2e_seconds"),
    Alias("vllm:request_queue_time_seconds", "request_queue_seconds"),
    Alias("vllm:request_inference_time_seconds", "request_inference_seconds"),
    Alias("vllm:request_prefill_time_seconds", "request_prefill_seconds"),
    Alias("vllm:request_decode_time_seconds", "request_decode_seconds"),
    Alias("vllm:request_prompt_tokens", "request_prompt_tokens"),
    Alias("vllm:request_prefill_kv_computed_tokens", "request_uncached_prompt_tokens"),
    Alias("vllm:request_generation_tokens", "request_generation_tokens"),
    Alias("vllm:request_max_num_generation_tokens", "request_longest_choice_tokens"),
    Alias("vllm:request_params_n", "request_choices"),
    Alias("vllm:request_params_max_tokens", "request_max_tokens"),
    Alias("vllm:iteration_tokens_total", "step_tokens"),
    Alias("vllm:kv_block_lifetime_seconds", "kv_block_lifetime_seconds"),
    Alias("vllm:kv_block_idle_before_evict_seconds", "kv_block_idle_before_evict_seconds"),
    Alias("vllm:kv_block_reuse_gap_seconds", "kv_block_reuse_gap_seconds"),
    Alias(
        "vllm:cache_config",
        "cache_config",
        lambda labels: {
            "block_size": labels["block_size"],
            "num_gpu_blocks": labels["num_blocks"],
        },
    ),
    Alias("http_requests", "requests", _http),
)


class WithVllmNames(Collector):
    """What `native` collects, and all of it that vLLM has a name for once more."""

    def __init__(self, native: Collector) -> None:
        self._native = native

    def collect(self) -> Iterator[Metric]:
        """Yield our families, then vLLM's."""
        families = {family.name: family for family in self._native.collect()}
        yield from families.values()
        for alias in ALIASES:
            if family := families.get(f"ragcache_{alias.source}"):
                yield _aliased(alias, family)


def _aliased(alias: Alias, family: Metric) -> Metric:
    values: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        labels = alias.labels(sample.labels)
        if labels is None or suffix == "_created":
            continue
        kept = {name: sample.labels[name] for name in ("model_name", "le") if name in sample.labels}
        pairs = (*kept.items(), ("engine", "0"), *labels.items())
        values[suffix, pairs] += sample.value
    metric = Metric(alias.name, family.documentation, family.type)
    for (suffix, pairs), value in values.items():
        metric.add_sample(alias.name + suffix, dict(pairs), value)
    return metric
