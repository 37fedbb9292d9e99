"""Health, readiness, models, the cache routes and API keys."""

import asyncio

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from ragcache.errors import ConfigError
from ragcache.types import Explanation, HostStats, MissReason, PoolCounts

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "one two three"}]}


async def get(url, path, **options):
    async with aiohttp.ClientSession(url) as http, http.get(path, **options) as response:
        return response.status, await response.json()


async def post(url, path, **options):
    async with aiohttp.ClientSession(url) as http, http.post(path, **options) as response:
        return response.status, await response.json()


async def test_the_server_answers_while_the_model_loads(start, serving):
    loading = asyncio.get_running_loop().create_future()
    url = await start(loading)
    assert await get(url, "/health") == (200, {"status": "ok"})
    assert await get(url, "/ready") == (503, {"ready": False, "reason": "the model is loading"})
    for status, body in (
        await post(url, "/v1/chat/completions", json=ASK),
        await post(url, "/v1/chat/completions", json={**ASK, "stream": True}),
        await get(url, "/v1/models"),
        await get(url, "/cache/stats"),
    ):
        assert status == 503
        assert body["error"]["code"] == "engine_unavailable"
        assert "loading" in body["error"]["message"]
    async with aiohttp.ClientSession(url) as http, http.get("/metrics") as response:
        assert response.status == 200
    loading.set_result(serving)
    assert await get(url, "/ready") == (200, {"ready": True, "reason": None})
    assert (await post(url, "/v1/chat/completions", json=ASK))[0] == 200


async def test_a_failed_load_is_the_reason_for_not_being_ready(start):
    loading = asyncio.get_running_loop().create_future()
    loading.set_exception(ConfigError("no such model"))
    url = await start(loading)
    status, body = await get(url, "/ready")
    assert status == 503
    assert "no such model" in body["reason"]
    assert (await post(url, "/v1/chat/completions", json=ASK))[0] == 503
    assert (await get(url, "/health"))[0] == 200


async def test_a_dead_engine_is_alive_but_not_ready(url, serving):
    serving.not_ready = "the engine died: out of memory"
    assert await get(url, "/ready") == (503, {"ready": False, "reason": serving.not_ready})
    assert (await get(url, "/health"))[0] == 200


async def test_models_are_listed_under_all_their_names(client):
    listed = await client.models.list()
    assert [model.id for model in listed.data] == ["tiny", "alias"]
    alias = await client.models.retrieve("alias")
    assert (alias.object, alias.created, alias.max_input_tokens) == ("model", 1_750_000_000, 1000)
    assert alias.created_at == "2025-06-15T15:06:40+00:00"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/unknown")
    assert caught.value.code == "model_not_found"


async def test_cache_stats_tell_hit_rates_tokens_and_blocks(url, client, serving):
    before = (await get(url, "/cache/stats"))[1]
    assert before["hit_rate"] == {"1m": None, "5m": None, "total": None}
    await client.chat.completions.create(**ASK)
    serving.script.cached_tokens = 3
    await client.chat.completions.create(**ASK)
    stats = (await get(url, "/cache/stats"))[1]
    assert stats["hit_rate"] == {"1m": 3 / 8, "5m": 3 / 8, "total": 3 / 8}
    assert stats["tokens"] == {"query": 8, "hit": 3}
    assert stats["saved"] == {"tokens": 3, "seconds": 3 / 200, "prefill_rate": 200}
    assert stats["pool"] == {"free": 90, "cached": 10, "held": 0, "total": 100, "retained": 0}
    assert stats["computed_tokens"] == 5
    assert stats["drafts"] == {"tokens": 9, "accepted": 6}
    assert (stats["block_size"], stats["evictions"], stats["preemptions"]) == (4, 3, 1)
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert "host" not in stats


async def test_cache_stats_show_the_host_tier_where_there_is_one(url, serving):
    serving.host = HostStats(PoolCounts(free=5, cached=3, held=2), 8, 6, 40, 30)
    assert (await get(url, "/cache/stats"))[1]["host"] == {
        "pool": {"free": 5, "cached": 3, "held": 2, "total": 10},
        "hit_tokens": 8,
        "evictions": 6,
        "swapped_out": 40,
        "swapped_in": 30,
    }


@pytest.mark.parametrize("path", ["/cache/reset", "/reset_prefix_cache"])
async def test_a_reset_forgets_the_callers_cache_whatever_runs(url, serving, path):
    serving.held = 5
    assert await post(url, path) == (200, {"reset": True, "blocks": 7})
    assert serving.dropped == [""]


async def test_a_tenant_sees_and_resets_only_its_own_cache(start, serving):
    url = await start(api_keys=["key-one", "key-two"])
    one, two = {"x-api-key": "key-one"}, {"x-api-key": "key-two"}
    serving.script.explanation = Explanation(4, 0, MissReason.COLD)
    _, answer = await post(url, "/v1/chat/completions", json=ASK, headers=one)
    mine = (await get(url, "/cache/stats", headers=one))[1]
    assert mine["tokens"] == {"query": 4, "hit": 0}
    assert "pool" not in mine
    assert (await get(url, "/cache/stats", headers=two))[1]["tokens"] == {"query": 0, "hit": 0}
    path = f"/cache/explain/{answer['id']}"
    status, body = await get(url, path, headers=one)
    assert (status, body["id"], body["reason"]) == (200, answer["id"], "cold")
    assert (await get(url, path, headers=two))[0] == 404
    await post(url, "/cache/reset", headers=one)
    assert serving.dropped == [serving.generations[0].request.tenant]


async def test_keys_open_the_api_and_name_the_tenant(start, serving, caplog):
    caplog.set_level("DEBUG")
    url = await start(api_keys=["key-one", "key-two"])
    for headers in (
        {"Authorization": "Bearer key-one"},
        {"authorization": "bearer key-one"},
        {"x-api-key": "key-one"},
        {"Authorization": "Bearer key-two"},
    ):
        assert (await post(url, "/v1/chat/completions", json=ASK, headers=headers))[0] == 200
    tenants = [generation.request.tenant for generation in serving.generations]
    assert len(set(tenants[:3])) == 1
    assert len(set(tenants)) == 2
    assert not any("key" in tenant or tenant == "" for tenant in tenants)
    assert "key-one" not in caplog.text


async def test_a_tenant_is_the_same_in_every_process(start, serving):
    for keys in (["key-one"], ["other", "key-one"]):
        url = await start(api_keys=keys)
        headers = {"x-api-key": "key-one"}
        await post(url, "/v1/chat/completions", json=ASK, headers=headers)
    first, second = [generation.request.tenant for generation in serving.generations]
    assert first == second


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic key-one"},
        {"Authorization": "key-one"},
        {"x-api-key": "key-on"},
        {"x-api-key": "kéy"},
    ],
)
async def test_without_a_key_there_is_401_but_probes_and_scrapes_work(start, serving, headers):
    url = await start(api_keys=["key-one"])
    for method, path in (
        (post, "/v1/chat/completions"),
        (get, "/v1/models"),
        (get, "/cache/stats"),
    ):
        status, body = await method(url, path, headers=headers)
        assert status == 401
        assert body["error"]["code"] == "invalid_api_key"
        assert body["error"]["type"] == "authentication_error"
    assert not serving.generations
    async with aiohttp.ClientSession(url) as http:
        for path in ("/health", "/ready", "/metrics"):
            async with http.get(path, headers=headers) as response:
                assert response.status == 200


async def test_a_wrong_key_raises_the_clients_own_error(start):
    url = await start(api_keys=["key-one"])
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
