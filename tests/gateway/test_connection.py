"""What cannot be read as HTTP is answered in JSON, and its content stays out of the log."""

import asyncio
import json
import logging

import pytest
from yarl import URL

SECRET = "sk-secret"
BAD = {
    "no HTTP at all": b"\x16\x03\x01\x02\x00sk-secret\r\n\r\n",
    "a header without a colon": b"GET /health HTTP/1.1\r\nHost: x\r\nsk-secret\r\n\r\n",
    "a header that is too long": b"GET / HTTP/1.1\r\nx-api-key: sk-secret"
    + b"x" * 70_000
    + b"\r\n\r\n",
    "an unknown version": b"GET /sk-secret HTTP/9\r\n\r\n",
    "two lengths": b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
    b"Content-Length: 2\r\nx-api-key: sk-secret\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD)
async def test_what_is_not_http_is_a_400_in_json_and_the_end(url, http, caplog, name):
    caplog.set_level(logging.DEBUG)
    reader, writer = await asyncio.open_connection(URL(url).host, URL(url).port)
    writer.write(BAD[name])
    answer = await asyncio.wait_for(reader.read(), 5)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.")
    assert b" 400 " in head.partition(b"\r\n")[0]
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].startswith("this cannot be read as HTTP: ")
    assert len(error["message"]) < 300
    writer.close()
    ours = [r for r in caplog.records if r.name.startswith(("ragcache", "aiohttp"))]
    assert len(ours) == 1
    assert "not HTTP" in ours[0].getMessage()
    assert not any(SECRET in r.getMessage() or r.exc_info for r in ours)
    async with http.get("/health") as response:
        assert response.status == 200
