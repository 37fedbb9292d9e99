"""A gateway whose metrics have seen everything.

The fixtures are imported by the conftest of each folder that uses them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import httpx2
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from redis_pool import RedisServer
from scripted import VOCAB, Gateway, ScriptedModel, app_in_thread

from ragcache.config import ServeSettings
from ragcache.gateway.route.app import create_app as create_router

SYSTEM = "You answer from the passages only, and say so where they tell nothing. " * 6


def traffic(http: httpx2.Client, model: ScriptedModel, name: str) -> None:
    """Requests of every kind: hits, misses for several reasons, markers, refusals."""
    ephemeral = {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
    for system in (SYSTEM, SYSTEM, f"{name}. {SYSTEM}", [ephemeral]):
        for question in ("Who keeps a light?", "Who keeps a light?", f"What is a lens, {name}?"):
            assert ask(http, system, question) == 200
    fillers = [f"{name} {number}. {SYSTEM}" for number in range(6)]
    for system in (*fillers, *fillers[::-1], SYSTEM):
        assert ask(http, system, "Who keeps a light?") == 200
    assert ask(http, {}, "Who?") == 400
    with broken(model):
        assert ask(http, SYSTEM, "Who?") == 500
    with ThreadPoolExecutor(12) as crowd:
        statuses = crowd.map(partial(ask, http, SYSTEM, max_tokens=120), fillers * 2)
    assert set(statuses) == {200, 429}


def ask(http: httpx2.Client, system: object, question: str, max_tokens: int = 12) -> int:
    """The status of an answer of so many tokens."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
    return http.post("/v1/chat/completions", json=body).status_code


@contextmanager
def broken(model: ScriptedModel) -> Iterator[None]:
    """Let the model's output be no numbers for a while."""
    model.logits = lambda _: torch.full((VOCAB,), torch.nan)
    yield
    del model.logits


@pytest.fixture(scope="session")
def busy(make_gateway) -> Iterator[Gateway]:
    """A gateway whose device and host pools are too small for what it is asked."""
    redis = RedisServer()
    redis.start()
    settings = ServeSettings(
        max_running=2, max_queue=2, redis_url=redis.url, advertise_url="http://busy:8000"
    )
    options = {"host_blocks": 24, "settings": settings, "metrics_compat": "vllm"}
    try:
        with make_gateway(24, **options) as gateway:
            traffic(gateway.http, gateway.model, "Anna")
            yield gateway
    finally:
        redis.close()


@pytest.fixture(scope="session")
def router(busy) -> Iterator[httpx2.Client]:
    """A client of a router in front of that gateway, which has forwarded some requests."""
    with (
        app_in_thread(partial(create_router, urls=[busy.url]), None) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        while not client.get("/ready").is_success:
            time.sleep(0.05)
        assert ask(client, SYSTEM, "Who keeps a light?") == 200
        assert ask(client, {}, "Who?") == 400
        yield client


@pytest.fixture(scope="session")
def samples(busy, router) -> dict[str, list[dict[str, str]]]:
    """The labels of every series that the gateway and the router expose, by name."""
    found = defaultdict(list)
    for page in (busy.http.get("/metrics").text, router.get("/metrics").text):
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found[sample.name].append(sample.labels)
    return dict(found)
