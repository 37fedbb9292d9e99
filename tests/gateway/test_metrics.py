"""What /metrics says equals what clients saw."""

import asyncio

import aiohttp
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ragcache.errors import EngineUnavailable, Overloaded
from ragcache.types import BlockTimes, Explanation, Histogram, HostStats, MissReason, PoolCounts

ASK = {"model": "alias", "messages": [{"role": "user", "content": "one two three four five six"}]}


@pytest.fixture
def scrape(http):
    """All samples by name and labels (in the order of their names); the model is checked."""

    async def scrape():
        async with http.get("/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=")
            page = await response.text()
        samples = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("model_name", "tiny") == "tiny"
                samples[(sample.name, *[labels[name] for name in sorted(labels)])] = sample.value
        return samples

    return scrape


async def test_counters_equal_the_sum_over_responses(client, serving, scrape):
    usages = []
    for cached in (0, 4, 3):
        serving.script.cached_tokens = cached
        answer = await client.chat.completions.create(**ASK, n=2, max_tokens=3)
        usages.append(answer.usage)
        stream = await client.chat.completions.create(
            **ASK, stream=True, stream_options={"include_usage": True}
        )
        usages.append([chunk async for chunk in stream][-1].usage)
    prompt = sum(usage.prompt_tokens for usage in usages)
    cached = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    samples = await scrape()
    assert samples["ragcache_prompt_tokens_total",] == prompt
    assert samples["ragcache_prefix_cache_query_tokens_total",] == prompt
    assert samples["ragcache_prefix_cache_hit_tokens_total",] == cached
    assert samples["ragcache_prompt_tokens_by_source_total", "device"] == cached
    assert samples["ragcache_prompt_tokens_by_source_total", "computed"] == prompt - cached
    assert samples["ragcache_generation_tokens_total",] == completion
    assert samples["ragcache_request_prompt_tokens_sum",] == prompt
    assert samples["ragcache_request_uncached_prompt_tokens_sum",] == prompt - cached
    assert samples["ragcache_request_generation_tokens_sum",] == completion
    assert samples["ragcache_requests_total", "chat", "length", "200"] == 3
    assert samples["ragcache_requests_total", "chat", "stop", "200"] == 3
    assert samples["ragcache_request_e2e_seconds_count",] == 6
    for outcome in ("miss", "hit", "partial"):
        assert samples["ragcache_time_to_first_token_seconds_count", outcome] == 2


async def test_what_was_never_begun_is_in_no_distribution_of_answers(client, http, serving, scrape):
    serving.script.refuse = Overloaded("full")
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(**ASK)
    serving.script.refuse, serving.script.queued = None, asyncio.Event()
    waiting = asyncio.create_task(client.chat.completions.create(**ASK))
    while not serving.generations:
        await asyncio.sleep(0.005)
    waiting.cancel()
    while not serving.generations[0].closed:
        await asyncio.sleep(0.005)
    serving.script.queued.set()
    await client.chat.completions.create(**ASK)
    samples = await scrape()
    assert samples["ragcache_requests_total", "chat", "error", "429"] == 1
    assert samples["ragcache_requests_total", "chat", "abort", "499"] == 1
    for name in ("request_e2e_seconds", "request_generation_tokens", "request_prompt_tokens"):
        assert samples[f"ragcache_{name}_count",] == 1


async def test_between_n_tokens_there_are_n_minus_one_gaps(client, scrape):
    await client.chat.completions.create(**ASK, n=2)
    assert (await scrape())["ragcache_inter_token_latency_seconds_count",] == 2 * 4


async def test_the_phases_of_a_request_add_up(client, serving, scrape):
    serving.script.pause = 0.002
    await client.chat.completions.create(**ASK, n=2, max_tokens=3)
    samples = await scrape()
    phases = ("queue", "prefill", "decode")
    for name in (*(f"{phase}_seconds" for phase in phases), "time_per_output_token_seconds"):
        assert samples[f"ragcache_request_{name}_count",] == 1
    decode = samples["ragcache_request_decode_seconds_sum",]
    assert decode > 0
    assert samples["ragcache_request_time_per_output_token_seconds_sum",] == decode / 2
    spent = sum(samples[f"ragcache_request_{phase}_seconds_sum",] for phase in phases)
    assert spent <= samples["ragcache_request_e2e_seconds_sum",]
    assert samples["ragcache_request_longest_choice_tokens_sum",] == 3
    assert samples["ragcache_request_choices_sum",] == 2
    assert samples["ragcache_request_max_tokens_sum",] == 3


async def test_metrics_tell_whether_the_gateway_is_ready(serving, scrape):
    assert (await scrape())["ragcache_ready",] == 1
    serving.not_ready = "no step for 61 seconds"
    assert (await scrape())["ragcache_ready",] == 0


async def test_the_engine_is_read_at_scrape_time(serving, scrape):
    assert (await scrape())["ragcache_kv_blocks", "held", "device"] == 0
    serving.held = 30
    samples = await scrape()
    assert samples["ragcache_kv_blocks", "held", "device"] == 30
    assert samples["ragcache_kv_blocks", "cached", "device"] == 10
    assert samples["ragcache_kv_blocks", "free", "device"] == 60
    assert samples["ragcache_kv_usage_ratio",] == 0.3
    assert samples["ragcache_requests_running",] == 30
    assert samples["ragcache_requests_waiting",] == 0
    assert samples["ragcache_kv_evictions_total", "device"] == 3
    assert not any("host" in labels for labels in samples)
    assert samples["ragcache_preemptions_total",] == 1
    assert samples["ragcache_draft_tokens_total",] == 9
    assert samples["ragcache_accepted_draft_tokens_total",] == 6
    assert samples["ragcache_cache_config_info", "4", "100"] == 1


async def test_the_host_tier_is_told_apart(client, serving, scrape):
    serving.host = HostStats(PoolCounts(free=5, cached=3, held=2), 2, 6, 40, 30)
    serving.script.cached_tokens = 3
    await client.chat.completions.create(**ASK)
    samples = await scrape()
    assert samples["ragcache_kv_blocks", "free", "host"] == 5
    assert samples["ragcache_kv_blocks", "cached", "host"] == 3
    assert samples["ragcache_kv_blocks", "held", "host"] == 2
    assert samples["ragcache_kv_evictions_total", "host"] == 6
    assert samples["ragcache_kv_blocks_swapped_total", "out"] == 40
    assert samples["ragcache_kv_blocks_swapped_total", "in"] == 30
    sources = {
        source: samples["ragcache_prompt_tokens_by_source_total", source]
        for source in ("computed", "device", "host")
    }
    prompt = samples["ragcache_prompt_tokens_total",]
    assert sources == {"computed": prompt - 3, "device": 1, "host": 2}


async def test_what_the_engine_counts_by_size_is_cumulative(serving, scrape):
    times = [Histogram((0.5, 2.0)) for _ in range(3)]
    for seconds in (0.5, 1.0, 60.0):
        times[2].observe(seconds)
    serving.block_times = BlockTimes(*times)
    samples = await scrape()
    name = "ragcache_kv_block_reuse_gap_seconds"
    buckets = [samples[f"{name}_bucket", bound] for bound in ("0.5", "2.0", "+Inf")]
    assert buckets == [1, 2, 3]
    assert samples[f"{name}_count",] == 3
    assert samples[f"{name}_sum",] == 61.5
    assert samples["ragcache_kv_block_lifetime_seconds_count",] == 0


async def test_every_request_has_one_outcome(client, http, serving, scrape):
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(**ASK, temperature=9)
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="gpt-99", prompt="x")
    serving.script.fail_after, serving.script.failure = 1, EngineUnavailable("died")
    with pytest.raises(openai.APIError):
        async for _ in await client.chat.completions.create(**ASK, stream=True):
            pass
    serving.script.fail_after, serving.script.queued = None, asyncio.Event()
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(**ASK, timeout=0.1)
    samples = await scrape()
    outcomes = {key[1:]: value for key, value in samples.items() if "requests_total" in key[0]}
    assert outcomes == {
        ("chat", "error", "400"): 1,
        ("completions", "error", "404"): 1,
        ("chat", "error", "503"): 1,
        ("chat", "abort", "499"): 1,
    }
    assert samples["ragcache_request_errors_total", "chat", "InvalidRequest"] == 1
    assert samples["ragcache_request_errors_total", "completions", "ModelNotFound"] == 1
    assert samples["ragcache_request_errors_total", "chat", "EngineUnavailable"] == 1


async def test_tokens_of_an_aborted_request_are_counted(client, serving, scrape):
    serving.script.pieces, serving.script.pause = ("word ",) * 1000, 0.002
    stream = await client.chat.completions.create(**ASK, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert (await scrape())["ragcache_generation_tokens_total",] > 0  # while it runs
    await stream.close()
    async with asyncio.timeout(5):
        while not serving.generations[0].closed:
            await asyncio.sleep(0.005)
    tokens = serving.generations[0].usage.completion_tokens
    samples = await scrape()
    assert samples["ragcache_generation_tokens_total",] == tokens
    assert samples["ragcache_requests_total", "chat", "abort", "499"] == 1


async def test_a_scraper_may_ask_for_openmetrics(url):
    headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with (
        aiohttp.ClientSession(url) as http,
        http.get("/metrics", headers=headers) as response,
    ):
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        assert (await response.text()).endswith("# EOF\n")


async def test_misses_are_counted_by_what_changed(client, serving, scrape):
    for segment, lost in (("tools", 64), ("messages.3", 16), ("messages.5", 4)):
        serving.script.explanation = Explanation(
            100, 0, MissReason.CHANGED, lost, token=3, segment=segment
        )
        await client.chat.completions.create(**ASK)
    serving.script.explanation = Explanation(100, 0, MissReason.EVICTED, 32)
    await client.chat.completions.create(**ASK)
    serving.script.explanation = Explanation(100, 96)
    await client.chat.completions.create(**ASK)
    samples = await scrape()
    reasons = {
        labels[1]: value
        for labels, value in samples.items()
        if labels[0] == "ragcache_cache_miss_reason_total"
    }
    assert reasons == {"tools": 1, "messages": 2, "evicted": 1}
    assert samples["ragcache_cache_lost_tokens_total", "messages"] == 20
    assert samples["ragcache_cache_lost_tokens_total", "evicted"] == 32


async def test_markers_are_counted_by_origin_and_writes_by_ttl(client, serving, scrape):
    serving.script.written = {"5m": 16, "auto": 4}
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    marked = {**ASK, "messages": [{"role": "user", "content": [part]}]}
    await client.chat.completions.create(**marked)
    serving.script.cached_tokens = 2
    await client.chat.completions.create(**ASK)
    samples = await scrape()
    assert samples["ragcache_cache_write_tokens_total", "5m"] == 32
    assert samples["ragcache_cache_write_tokens_total", "auto"] == 8
    assert samples["ragcache_cache_breakpoints_total", "explicit", "miss"] == 1
    assert samples["ragcache_cache_breakpoints_total", "implicit", "miss"] == 1
    assert samples["ragcache_cache_breakpoints_total", "implicit", "hit"] == 1
