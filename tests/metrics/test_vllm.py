"""vLLM's names: what its dashboards and the tools that read them ask for is there, and equal."""

from __future__ import annotations

import pytest
from queries import check_exposed

FILTER = 'job=~".*", model_name=~".+", instance=~".*", engine=~"0|1"'
LATENCIES = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
)
SIZES = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
    "iteration_tokens_total",
    "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds",
)
COUNTED = (
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
)
QUERIES = (
    *(f"sum(rate(vllm:{name}_total{{{FILTER}}}[1m]))" for name in COUNTED),
    *(
        f"histogram_quantile(0.95, sum by (le) (rate(vllm:{name}_bucket{{{FILTER}}}[1m])))"
        for name in LATENCIES
    ),
    *(
        f"rate(vllm:{name}_sum{{{FILTER}}}[1m]) / rate(vllm:{name}_count{{{FILTER}}}[1m])"
        for name in LATENCIES
    ),
    *(f"sum by (le) (increase(vllm:{name}_bucket{{{FILTER}}}[1m]))" for name in SIZES),
    f"sum by (model_name) (vllm:num_requests_running{{{FILTER}}})",
    f"vllm:num_requests_waiting{{{FILTER}}}",
    f'sum(vllm:num_requests_waiting_by_reason{{{FILTER}, reason="capacity"}})',
    f"max by (engine) (vllm:kv_cache_usage_perc{{{FILTER}}})",
    f"rate(vllm:num_preemptions_total{{{FILTER}}}[1m])",
    f"sum by (finished_reason) (rate(vllm:request_success_total{{{FILTER}}}[1m]))",
    f"sum by (source) (rate(vllm:prompt_tokens_by_source_total{{{FILTER}}}[1m]))",
    f'sum(rate(vllm:prompt_tokens_by_source_total{{{FILTER}, source="local_compute"}}[1m]))',
    f"sum by (source) (rate(vllm:prompt_tokens_cached_by_source_total{{{FILTER}}}[1m]))",
    f"sum by (reason) (rate(vllm:admission_rejections_total{{{FILTER}}}[1m]))",
    f"max by (block_size, num_gpu_blocks) (vllm:cache_config_info{{{FILTER}}})",
    'sum(rate(http_requests_total{status="5xx", handler=~"/v1/.+", method="POST"}[1m]))',
)


@pytest.mark.parametrize("query", QUERIES)
def test_what_its_dashboards_ask_for_is_exposed(query, samples):
    check_exposed(query, samples)


def total(values: dict[str, float], name: str, *labels: str) -> float:
    """The sum over the series of a name with all of the labels."""
    found = {each: value for each, value in values.items() if each.partition("{")[0] == name}
    assert found
    return sum(value for each, value in found.items() if all(label in each for label in labels))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("generation_tokens_total", "generation_tokens_total"),
        ("draft_tokens_total", "spec_decode_num_draft_tokens_total"),
        ("accepted_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
        ("prefix_cache_query_tokens_total", "prefix_cache_queries_total"),
        ("prefix_cache_hit_tokens_total", "prompt_tokens_cached_total"),
        ("prompt_tokens_total", "prompt_tokens_by_source_total"),
        ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count"),
        ("time_to_first_token_seconds_sum", "time_to_first_token_seconds_sum"),
        ("request_queue_seconds_sum", "request_queue_time_seconds_sum"),
        ("step_tokens_sum", "iteration_tokens_total_sum"),
        ("kv_usage_ratio", "kv_cache_usage_perc"),
        ("kv_block_lifetime_seconds_count", "kv_block_lifetime_seconds_count"),
    ],
)
def test_both_names_tell_the_same(ours, theirs, busy):
    values = busy.metrics()
    assert total(values, f"vllm:{theirs}") == pytest.approx(total(values, f"ragcache_{ours}"))


def test_the_tiers_are_its_local_and_its_external_cache(busy):
    values = busy.metrics()
    source = "ragcache_prompt_tokens_by_source_total"
    device, host, computed = (
        total(values, source, f'source="{each}"') for each in ("device", "host", "computed")
    )
    assert min(device, host, computed) > 0
    assert total(values, "vllm:prefix_cache_hits_total") == device
    assert total(values, "vllm:external_prefix_cache_hits_total") == host
    assert total(values, "vllm:external_prefix_cache_queries_total") == host + computed


def test_refused_and_failed_requests_are_no_successes(busy):
    values = busy.metrics()
    answered, refused, failed = (
        total(values, "ragcache_requests_total", f'status="{status}"') for status in (200, 429, 500)
    )
    assert total(values, "vllm:request_success_total") == answered
    assert total(values, "vllm:admission_rejections_total") == refused > 0
    begun = total(values, "vllm:e2e_request_latency_seconds_count")
    assert answered <= begun <= answered + failed
    assert total(values, "http_requests_total", 'status="5xx"') == failed > 0


def test_its_series_have_the_labels_of_a_model_and_an_engine(samples):
    theirs = [labels for name in samples if name.startswith("vllm:") for labels in samples[name]]
    assert {(labels["model_name"], labels["engine"]) for labels in theirs} == {("tiny", "0")}


def test_names_are_whole_in_whatever_format_is_asked_for(busy):
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    page = busy.http.get("/metrics", headers={"Accept": accept}).text
    assert "\nvllm:num_requests_running{" in page


def test_without_the_option_there_are_only_our_names(make_gateway):
    with make_gateway() as gateway:
        assert {name[:9] for name in gateway.metrics()} == {"ragcache_"}
