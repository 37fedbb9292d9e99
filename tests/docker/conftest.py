"""A gateway whose metrics have seen everything, and a server that a health check can ask."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted import Gateway, make_gateway

from ragcache.config import ServeSettings

__all__ = ["make_gateway"]

SYSTEM = "You answer from the passages only, and say so where they tell nothing. " * 6


def traffic(gateway: Gateway, name: str) -> None:
    """Requests of every kind: hits, misses for several reasons, markers, refusals."""
    ephemeral = {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
    for system in (SYSTEM, SYSTEM, f"{name}. {SYSTEM}", [ephemeral]):
        for question in ("Who keeps a light?", "Who keeps a light?", f"What is a lens, {name}?"):
            ask(gateway, system, question)
    fillers = [f"{name} {number}. {SYSTEM}" for number in range(6)]
    for system in (*fillers, *fillers[::-1], SYSTEM):
        ask(gateway, system, "Who keeps a light?")
    gateway.http.post("/v1/chat/completions", json={"messages": "none"})


def ask(gateway: Gateway, system: object, question: str) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 12}
    gateway.http.post("/v1/chat/completions", json=body).raise_for_status()


@pytest.fixture(scope="session")
def busy(make_gateway) -> Iterator[Gateway]:
    """A gateway whose device and host pools are too small for what it is asked."""
    settings = ServeSettings(max_running=2, max_queue=2)
    with make_gateway(num_blocks=24, host_blocks=24, settings=settings) as gateway:
        traffic(gateway, "Anna")
        yield gateway


@pytest.fixture(scope="session")
def samples(busy) -> dict[str, list[dict[str, str]]]:
    """The labels of every series that the gateway exposes, by name."""
    found = defaultdict(list)
    for family in text_string_to_metric_families(busy.http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name].append(sample.labels)
    return found


@pytest.fixture
def http_server() -> Iterator[tuple[dict[str, int], int]]:
    """The status that each path is answered with, to be changed, and the port."""
    status: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[self.path])
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield status, server.server_port
        server.shutdown()
        thread.join()
