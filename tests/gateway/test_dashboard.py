"""The dashboard: what its data are, and what a browser makes of them."""

import asyncio
import base64
import hashlib
import re

import aiohttp
import pytest
from browser import chromium, needs_chromium, tab
from prometheus_client.parser import text_string_to_metric_families

from ragcache.gateway.app import create_app, listening
from ragcache.types import Explanation, MissReason

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "one two three"}]}
SYSTEM = "You answer from the passages only. " * 30
TOOL = {"type": "function", "function": {"name": "search", "description": "Look it up. " * 20}}
STATE = "document.querySelector('#state').textContent"
IS_LIVE = f"{STATE} === 'live'"


async def ask(http, body=ASK, **options):
    async with http.post("/v1/chat/completions", json=body, **options) as response:
        assert response.status == 200
        return await response.json()


async def data_of(http, **options):
    async with http.get("/dashboard/data", **options) as response:
        assert response.status == 200
        return await response.json()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
async def page(browser):
    """A tab whose scripts must not fail, nor meet the policy of the page."""
    async with tab(browser) as page:
        yield page
    assert not page.problems


async def test_the_page_allows_its_own_code_and_no_other(http):
    async with http.get("/dashboard") as response:
        text, policy = await response.text(), response.headers["Content-Security-Policy"]
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    for tag in ("style", "script"):
        (code,) = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"(src|href)=\"(?!data:)\w+:", text)  # nothing from elsewhere
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write", text)


async def test_there_are_data_before_there_is_a_model(start, serving):
    loading = asyncio.get_running_loop().create_future()
    url = await start(loading)
    async with aiohttp.ClientSession(url) as http:
        before = await data_of(http)
        assert (before["ready"], before["reason"]) == (False, "the model is loading")
        assert before["stats"] is None
        loading.set_result(serving)
        after = await data_of(http)
        assert (after["ready"], after["model"]) == (True, "tiny")
        async with http.get("/cache/stats") as response:
            assert after["stats"] == await response.json()


async def test_the_history_is_kept_while_nobody_looks(start, serving):
    serving.script.cached_tokens, serving.held = 3, 5
    async with aiohttp.ClientSession(await start()) as http:
        await ask(http)
        await asyncio.sleep(2.1)  # the next slot
        data = await data_of(http)
    history, ttft = data["history"], data["ttft"]
    lines = [history[name] for name in ("query", "hit", "running", "waiting")]
    assert {len(line) for line in lines} == {300}
    assert sum(filter(None, history["query"])) == 4
    assert sum(filter(None, history["hit"])) == 3
    assert history["running"][-2:] == [5, 5]
    assert 0 < ttft["1m"]["p50"] == ttft["1m"]["p95"] < 10
    assert len(ttft["p50"]) * ttft["seconds"] == 300 * history["seconds"]


async def test_misses_are_listed_the_latest_first_and_lead_to_their_explanation(http, serving):
    for reason in (MissReason.COLD, None, MissReason.CHANGED):
        serving.script.explanation = Explanation(4, 0, reason, 3, token=2, segment="system")
        answer = await ask(http)
    changed, cold = (await data_of(http))["misses"]
    assert 0 <= changed.pop("age") <= cold["age"] < 10
    assert changed == {
        "id": answer["id"],
        "reason": "changed",
        "segment": "system",
        "token": 2,
        "prompt_tokens": 4,
        "hit_tokens": 0,
        "lost_tokens": 3,
    }
    assert cold["reason"] == "cold"
    async with http.get(f"/cache/explain/{changed['id']}") as response:
        assert (await response.json())["reason"] == "changed"


async def test_tenants_see_their_own_history_and_misses(start, serving):
    url = await start(api_keys=["one", "two"])
    serving.script.explanation = Explanation(4, 0, MissReason.COLD)
    mine, others = {"x-api-key": "one"}, {"x-api-key": "two"}
    async with aiohttp.ClientSession(url) as http:
        await ask(http, headers=mine)
        assert len((await data_of(http, headers=mine))["misses"]) == 1
        data = await data_of(http, headers=others)
        assert data["misses"] == []
        assert not any(data["history"]["query"])
        assert data["ttft"]["1m"]["p50"] is None
        assert "running" not in data["history"]
        assert "pool" not in data["stats"]
        async with http.get("/dashboard/data") as response:
            assert response.status == 401
        async with http.get("/dashboard") as response:
            assert response.status == 200


# In a browser


async def samples(http):
    async with http.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    return {
        (sample.name.removeprefix("ragcache_"), *sorted(set(sample.labels.values()) - {"tiny"})): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }


async def agents(http, enough):
    """Six agents with one system prompt, half of them with tools; each turn is asked anew."""

    async def agent(number):
        tools = {"tools": [TOOL], "tool_choice": "none"} if number % 2 else {}
        messages = [{"role": "system", "content": SYSTEM}]
        for turn in range(3):
            messages.append({"role": "user", "content": f"Question {turn} of {number}?"})
            body = {"model": "tiny", "messages": messages, "max_tokens": 8, **tools}
            answer = await ask(http, body)
            while turn == 2 and not enough.is_set():
                answer = await ask(http, body)
            messages.append(answer["choices"][0]["message"] | {"role": "assistant"})

    await asyncio.gather(*map(agent, range(6)))


def percent(share):
    return f"{100 * share:.1f} %"


def count(number):
    thousands = f"{number / 1000:.1f}K".replace(".0K", "K")
    return f"{number:,.0f}" if number < 10_000 else thousands


@needs_chromium
async def test_the_page_shows_what_the_metrics_say(make_gateway, page):
    with make_gateway(num_blocks=500) as gateway:
        await page.open(f"{gateway.url}/dashboard")
        await page.until(IS_LIVE)
        assert "ask twice" in await page.text("#branches")
        assert await page.text("#rate") == "–"
        async with aiohttp.ClientSession(gateway.url) as http:
            load = asyncio.create_task(agents(http, enough := asyncio.Event()))
            await page.until("+document.querySelector('#running').textContent > 0")
            enough.set()
            await load
            gateway.at_rest()
            metrics = await samples(http)
        await page.until("document.querySelector('#running').textContent === '0'")
        await asyncio.sleep(2.5)  # one more look

        query = metrics["prefix_cache_query_tokens_total",]
        hit = metrics["prefix_cache_hit_tokens_total",]
        assert await page.text("#rate-total") == percent(hit / query)
        assert await page.text("#rate") == percent(hit / query)
        assert await page.text("#saved") == count(hit)
        for place, part in enumerate(("tools", "system", "messages")):
            found = metrics["segment_hit_tokens_total", part]
            looked_up = metrics["segment_query_tokens_total", part]
            shown = await page.run(
                f"[...document.querySelectorAll('#segments .number')][{place}].textContent"
            )
            assert shown == percent(found / looked_up)
        pool = await page.text("#pool")
        for state in ("held", "cached", "free"):
            assert f"{metrics['kv_blocks', *sorted(('device', state))]:.0f}\n{state}" in pool
        cells = await page.run("document.querySelectorAll('#pool rect.cached').length")
        scale = int(re.search(r"\d+", await page.text("#pool-scale"))[0])
        assert cells == round(metrics["kv_blocks", "cached", "device"] / scale)

        hottest = (await page.text("#branches tbody tr")).split()
        (first, *_) = gateway.http.get("/cache/stats").json()["prefixes"]
        assert hottest[:2] == [first["fingerprint"], str(first["tokens"])]
        misses = await page.run("document.querySelectorAll('#misses tbody tr').length")
        missed = [value for key, value in metrics.items() if key[0] == "cache_miss_reason_total"]
        assert misses == sum(missed) > 0
        assert await page.run("document.querySelectorAll('.chart .hit').length") >= 2


@needs_chromium
async def test_a_miss_opens_its_explanation(url, http, serving, page):
    serving.script.explanation = Explanation(900, 12, MissReason.CHANGED, 880, 12, segment="system")
    await ask(http)
    await page.open(f"{url}/dashboard")
    await page.until("document.querySelector('#misses a')")
    await page.run("document.querySelector('#misses a').click()")
    await page.until("document.querySelector('dialog').open")
    shown = await page.text("dialog")
    assert "Put what changes behind what stays" in shown
    assert "880" in shown


@needs_chromium
async def test_the_page_outlives_the_server(serving, page, unused_tcp_port):
    def gateway():
        loading = asyncio.get_running_loop().create_future()
        loading.set_result(serving)
        return listening(create_app(loading), "127.0.0.1", unused_tcp_port)

    async with gateway() as url:
        await page.open(f"{url}/dashboard")
        await page.until(IS_LIVE)
    await page.until(f"{STATE}.startsWith('no answer')")
    async with gateway():
        await page.until(IS_LIVE)
    page.problems = [each for each in page.problems if "Failed to load resource" not in each]


async def enter(page, key):
    await page.run(f"document.querySelector('#key').value = {key!r}")
    await page.run("document.querySelector('#ask button').click()")


@needs_chromium
async def test_the_page_asks_for_a_key_and_keeps_it_in_its_tab(start, page):
    url = await start(api_keys=["right"])
    await page.open(f"{url}/dashboard")
    await page.until("!document.querySelector('#ask').hidden")
    await enter(page, "wrong")
    await page.until("!document.querySelector('#refused').hidden")
    await enter(page, "right")
    await page.until(IS_LIVE)
    assert not await page.text("#ask")
    assert not await page.text("#pool-panel")
    assert await page.run("Object.values(sessionStorage)") == ["right"]
    assert await page.run("[localStorage.length, document.cookie]") == [0, ""]
    await page.run("document.querySelector('#forget').click()")
    await page.until("!document.querySelector('#ask').hidden")
    assert await page.run("sessionStorage.length") == 0
    page.problems = [each for each in page.problems if "status of 401" not in each]


@needs_chromium
async def test_no_string_becomes_markup(url, serving, http, page):
    evil = "<img src=x onerror='document.title=1'>"
    serving.model_names = ("tiny", evil)
    serving.script.explanation = Explanation(9, 0, MissReason.CHANGED, 1, 1, segment=evil)
    await ask(http)
    serving.model_names = (evil,)
    await page.open(f"{url}/dashboard")
    await page.until("document.querySelector('#misses a')")
    assert await page.text("#model") == evil
    assert evil in await page.text("#misses")
    assert await page.run("document.querySelectorAll('img').length") == 0


@needs_chromium
@pytest.mark.parametrize("width", [390, 1280])
async def test_nothing_is_wider_than_the_screen(url, http, serving, page, width):
    serving.script.explanation = Explanation(900, 12, MissReason.BELOW_BLOCK, 0, 12, segment="x")
    await ask(http)
    await page.appear(width)
    await page.open(f"{url}/dashboard")
    await page.until(IS_LIVE)
    assert await page.run("document.documentElement.scrollWidth") <= width
