"""One line for each request, with all that one needs to know and nothing that was said."""

import asyncio
import json
import logging

import aiohttp
import pytest

from ragcache.errors import RequestTimeout
from ragcache.logs import JsonFormatter
from ragcache.types import Explanation, MissReason

CHAT, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/completions"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "nobody logs this"}]}
ASK["max_tokens"] = 100


@pytest.fixture
def lines(caplog):
    """What has been logged of so many requests: the text, and the fields as JSON has them.

    A stream's line is written behind the last byte of the stream.
    """
    caplog.set_level(logging.INFO, "ragcache")

    async def lines(count):
        async with asyncio.timeout(10):
            while len(records := [r for r in caplog.records if hasattr(r, "fields")]) < count:
                await asyncio.sleep(0.005)
        assert len(records) == count
        assert "nobody logs this" not in caplog.text
        return [(r.getMessage(), json.loads(JsonFormatter().format(r))) for r in records]

    return lines


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_line(http, serving, lines, path, stream):
    serving.script.cached_tokens = 3
    serving.script.explanation = Explanation(
        4, 3, MissReason.CHANGED, 1, token=12, segment="system", character=10, previous="chatcmpl-1"
    )
    headers = {"x-request-id": "mine-1"}
    async with http.post(path, json=ASK | {"stream": stream}, headers=headers) as response:
        text = await response.text()
    ((line, fields),) = await lines(1)
    assert fields["response_id"] in text
    assert fields.pop("duration") >= fields.pop("time_to_first_token") > 0
    named = {key: fields[key] for key in fields if key not in ("time", "message", "response_id")}
    assert named == {
        "level": "info",
        "logger": "ragcache.gateway.middleware",
        "request_id": "mine-1",
        "method": "POST",
        "path": path,
        "status": 200,
        "finish_reason": "stop",
        "prompt_tokens": 4,
        "hit_tokens": 3,
        "completion_tokens": 5,
        "miss_reason": "changed",
        "lost_tokens": 1,
    }
    assert line.startswith(
        f"POST {path} 200 stop, 3 of 4 prompt tokens cached, changed in system at token 12 "
        "(character 10) compared with chatcmpl-1, 1 lost, 5 generated, first token 0."
    )
    assert line.endswith(f" s, {fields['response_id']}, mine-1")


async def test_the_tokens_of_several_prompts_are_added_up(http, lines):
    body = {"model": "tiny", "prompt": ["a", "b c"], "max_tokens": 2}
    await (await http.post(COMPLETIONS, json=body)).read()
    ((_, fields),) = await lines(1)
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == (3, 4)
    assert fields["finish_reason"] == "length"


async def test_a_failure_says_what_failed(http, serving, lines):
    serving.script.fail_after, serving.script.failure = 2, RequestTimeout("took long")
    for stream in (False, True):
        await (await http.post(CHAT, json=ASK | {"stream": stream})).read()
    for line, fields in await lines(2):  # a stream's status was sent: what it came to is told
        assert (fields["status"], fields["error_type"]) == (504, "RequestTimeout")
        assert (fields["finish_reason"], fields["completion_tokens"]) == ("error", 2)
        assert line.startswith("POST /v1/chat/completions 504 RequestTimeout, ")


async def test_refusals_are_lines_too(start, lines):
    url = await start(api_keys=["team:sk-secret"])
    async with aiohttp.ClientSession(url) as http:
        await http.post(CHAT, json=ASK)
        await http.post(CHAT, data=b"{", headers={"x-api-key": "sk-secret"})
        await http.get("/nowhere%0Aelse?x-api-key=sk-secret", headers={"x-api-key": "sk-secret"})
        async with http.get("/metrics") as response:
            assert "sk-secret" not in await response.text()
    unknown, bad, nowhere = await lines(3)
    assert unknown[1]["error_type"] == "Unauthorized"
    assert "tenant" not in unknown[1]
    assert bad[1]["status"] == 400
    assert len(bad[1]["tenant"]) == 16
    assert nowhere[1]["path"] == "/nowhere%0Aelse"
    assert nowhere[1]["status"] == 404
    assert not any("sk-secret" in line or "team" in line for line, _ in (unknown, bad, nowhere))


async def test_a_client_that_leaves_is_a_line_too(http, serving, lines):
    serving.script.pieces, serving.script.pause = ("word ",) * 1000, 0.005
    async with http.post(CHAT, json=ASK | {"max_tokens": 1000, "stream": True}) as response:
        await response.content.readline()
    ((_, fields),) = await lines(1)
    assert (fields["status"], fields["finish_reason"]) == (499, "abort")
    assert "error_type" not in fields


async def test_probes_and_scrapers_do_not_fill_the_log(http, lines, caplog):
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        await (await http.get(path)).read()
    ((_, fields),) = await lines(1)
    assert fields["path"] == "/v1/models"
    caplog.set_level(logging.DEBUG, "ragcache")
    await (await http.get("/health")).read()
    assert (await lines(2))[1][1]["path"] == "/health"


def test_json_lines_hold_whatever_was_logged():
    try:
        raise ValueError("broken\nin two")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("a", logging.ERROR, "f", 1, "wörld %s", ("é\n",), info)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed["message"] == "wörld é\n"
    assert parsed["exception"].endswith("ValueError: broken\nin two")
    assert parsed["time"].endswith("+00:00")


async def test_watchers_do_not_fill_the_log(start, caplog):
    caplog.set_level(logging.DEBUG, "ragcache")
    url = await start(api_keys=["key-one"])
    async with aiohttp.ClientSession(url) as http:
        for path in ("/cache/stats", "/dashboard/data"):
            await http.get(path, headers={"x-api-key": "key-one"})
            await http.get(path)
    logged = [(r.fields["status"], r.levelname) for r in caplog.records if hasattr(r, "fields")]
    assert logged == [(200, "DEBUG"), (401, "INFO")] * 2
