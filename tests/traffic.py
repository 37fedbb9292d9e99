"""A gateway whose metrics have seen everything.

The fixtures are imported by the conftest of each folder that uses them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from scripted import VOCAB, Gateway, ScriptedModel

from ragcache.config import ServeSettings

SYSTEM = "You answer from the passages only, and say so where they tell nothing. " * 6


def traffic(gateway: Gateway, name: str) -> None:
    """Requests of every kind: hits, misses for several reasons, markers, refusals."""
    ephemeral = {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
    for system in (SYSTEM, SYSTEM, f"{name}. {SYSTEM}", [ephemeral]):
        for question in ("Who keeps a light?", "Who keeps a light?", f"What is a lens, {name}?"):
            assert ask(gateway, system, question) == 200
    fillers = [f"{name} {number}. {SYSTEM}" for number in range(6)]
    for system in (*fillers, *fillers[::-1], SYSTEM):
        assert ask(gateway, system, "Who keeps a light?") == 200
    assert ask(gateway, {}, "Who?") == 400
    with broken(gateway.model):
        assert ask(gateway, SYSTEM, "Who?") == 500
    with ThreadPoolExecutor(12) as crowd:
        statuses = crowd.map(partial(ask, gateway, SYSTEM, max_tokens=120), fillers * 2)
    assert set(statuses) == {200, 429}


def ask(gateway: Gateway, system: object, question: str, max_tokens: int = 12) -> int:
    """The status of an answer of so many tokens."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
    return gateway.http.post("/v1/chat/completions", json=body).status_code


@contextmanager
def broken(model: ScriptedModel) -> Iterator[None]:
    """Let the model's output be no numbers for a while."""
    model.logits = lambda _: torch.full((VOCAB,), torch.nan)
    yield
    del model.logits


@pytest.fixture(scope="session")
def busy(make_gateway) -> Iterator[Gateway]:
    """A gateway whose device and host pools are too small for what it is asked."""
    settings = ServeSettings(max_running=2, max_queue=2)
    with make_gateway(24, host_blocks=24, settings=settings, metrics_compat="vllm") as gateway:
        traffic(gateway, "Anna")
        yield gateway


@pytest.fixture(scope="session")
def samples(busy) -> dict[str, list[dict[str, str]]]:
    """The labels of every series that the gateway exposes, by name."""
    found = defaultdict(list)
    for family in text_string_to_metric_families(busy.http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name].append(sample.labels)
    return dict(found)
