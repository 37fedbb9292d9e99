"""A chat server without a model: words are tokens, answers are made up, the cache is ideal."""

import asyncio
import html.parser
import json
import re
from collections import defaultdict
from contextlib import asynccontextmanager
from xml.etree import ElementTree

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ragcache.bench.ideal import IdealCache

BLOCK_SIZE = 4


class WordTokenizer:
    """Every word is a token, and so is the start of every message."""

    def __init__(self):
        self.ids = {}

    def prompt_ids(self, messages):
        parts = [f"<{message['role']}> {message['content']}" for message in messages]
        return self.text_ids(" ".join([*parts, "<assistant>"]))

    def text_ids(self, text):
        return [self.ids.setdefault(word, len(self.ids)) for word in text.split()]


class FakeChatServer:
    """Records requests; `refusal` (status, body) and `stream` (raw events) override answers."""

    def __init__(self):
        self.tokenizer = WordTokenizer()
        self.caches = defaultdict(lambda: IdealCache(BLOCK_SIZE))
        self.requests = []
        self.keys = set()
        self.refusal = None
        self.stream = None
        self.running = self.most_running = 0
        self.url = ""

    def app(self):
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat)
        return app

    async def models(self, request):
        return web.json_response({"data": [{"id": "made-up"}]})

    async def chat(self, request):
        body = await request.json()
        self.requests.append(body)
        self.keys.add(request.headers.get("Authorization"))
        if self.refusal:
            status, text = self.refusal
            return web.Response(status=status, text=text)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self.stream if self.stream is not None else self.answer(body):
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())
            await asyncio.sleep(0.001)
        self.running -= 1
        return response

    def answer(self, body):
        prompt = self.tokenizer.prompt_ids(body["messages"])
        words = [f"w{len(prompt)}.{i}" for i in range(body["max_tokens"])]
        cache = self.caches[body.get("cache_salt")]
        cached = cache.hit_tokens(prompt)
        cache.add(prompt + self.tokenizer.text_ids(" ".join(words[:-1])))
        for word in words:
            yield {"choices": [{"delta": {"content": f"{word} "}, "finish_reason": None}]}
        yield {"choices": [{"delta": {}, "finish_reason": "length"}]}
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(words),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        yield {"choices": [], "usage": usage}
        yield "[DONE]"


@pytest.fixture
async def fake():
    async with running_fake() as server:
        yield server


@pytest.fixture
async def other_fake():
    async with running_fake() as server:
        yield server


@asynccontextmanager
async def running_fake():
    server = FakeChatServer()
    async with TestServer(server.app()) as running:
        server.url = str(running.make_url("/v1"))
        yield server


class Page(html.parser.HTMLParser):
    """The tags of a page, and what it refers to."""

    def __init__(self):
        super().__init__()
        self.tags, self.addresses, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in {"src", "href", "action"}]
        if tag not in {"meta"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def check_page():
    """Check that a page is whole, that its plots are XML, and that it loads nothing."""

    def check(text):
        parsed = Page()
        parsed.feed(text)
        assert parsed.open == []
        assert parsed.addresses == []
        assert not {"script", "link", "img", "iframe"} & set(parsed.tags)
        assert not re.search(r"https?://|url\(|@import|@font-face", text)
        assert "prefers-color-scheme: dark" in text
        for plot in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
            ElementTree.fromstring(plot)

    return check
