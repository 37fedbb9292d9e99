"""aiohttp's side of a connection, with our words for what never becomes a request."""

from __future__ import annotations

import logging

from aiohttp import web

from ragcache.gateway.failures import Failure
from ragcache.gateway.middleware import new_request_id

log = logging.getLogger(__name__)


class Connection(web.RequestHandler):
    """Answers what cannot be read as HTTP in JSON too; which API it was meant for is not known."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See aiohttp's; raises ConnectionError when a response has begun already."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun")
        request_id = new_request_id()
        failure = self._failure(request_id, status, exc, message)
        body = failure.body(request.path, request_id)
        response = web.json_response(body, status=failure.status)
        response.force_close()
        return response

    def _failure(
        self, request_id: str, status: int, exc: BaseException | None, message: str | None
    ) -> Failure:
        if status < 500:
            # Only the kind is logged: the rest is what a client has sent, keys included.
            log.info("%s: not HTTP: %s", request_id, type(exc).__name__)
            first = (message or "").partition("\n")[0].rstrip(": ")
            return Failure(status, f"this cannot be read as HTTP: {first[:200]}")
        return Failure.of(exc if isinstance(exc, Exception) else Exception(message), request_id)
