"""A gateway to be watched, and a server that a health check can ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from scripted import make_gateway
from traffic import busy, router, samples

__all__ = ["busy", "make_gateway", "router", "samples"]


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
