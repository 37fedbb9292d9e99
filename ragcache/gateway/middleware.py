"""What happens to every request: an id, a line in the log, an error shape, a measurement."""

from __future__ import annotations

import logging
import re
import time
from http import HTTPStatus
from uuid import uuid4

from aiohttp import web
from aiohttp.typedefs import Handler

from ragcache.gateway.failures import Failure
from ragcache.gateway.meter import METER, METRICS, RequestMeter
from ragcache.gateway.record import RECORD, Record
from ragcache.gateway.tenants import OPEN_PATHS, POLLED_PATHS
from ragcache.gateway.tracing import TRACER

REQUEST_ID = web.RequestKey("request_id", str)
_SANE_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

log = logging.getLogger(__name__)


def new_request_id() -> str:
    """One that no other request has."""
    return f"req-{uuid4().hex}"


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request the client's id for it, or a new one."""
    given = request.headers.get("x-request-id", "")
    request[REQUEST_ID] = given if _SANE_ID.fullmatch(given) else new_request_id()
    return await handler(request)


@web.middleware
async def tell(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One line in the log and, with a tracer, one span for each request, however it ends."""
    record = request[RECORD] = Record.of(request, request[REQUEST_ID])
    try:
        response = await handler(request)
        record.status = record.status or response.status
        return response
    except BaseException:
        record.status = record.status or 499  # the client has left
        raise
    finally:
        record.end = time.perf_counter()
        _tell(request, record)


def _tell(request: web.Request, record: Record) -> None:
    fields = record.fields()
    tracer = request.app[TRACER]
    if tracer is not None and record.api is not None:
        fields["trace_id"] = tracer.span(record, request.headers)
    # Those would fill the log.
    is_usual = request.path in OPEN_PATHS or (
        request.path in POLLED_PATHS and record.status < HTTPStatus.BAD_REQUEST
    )
    level = logging.DEBUG if is_usual else logging.INFO
    log.log(level, "%s", record.line(), extra={"fields": fields})


async def show_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler of aiohttp's on_response_prepare: streams get the header too."""
    if REQUEST_ID in request:
        response.headers["x-request-id"] = request[REQUEST_ID]
        response.headers["request-id"] = request[REQUEST_ID]  # Anthropic's name for it


@web.middleware
async def shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every exception as JSON in the route's error shape."""
    try:
        return await handler(request)
    except ConnectionError:
        return web.Response(status=499)  # nobody is left to read it
    except Exception as error:
        failure = Failure.of(error, request[REQUEST_ID])
        body = failure.body(request.path, request[REQUEST_ID])
        return web.json_response(body, status=failure.status, headers=failure.headers)


@web.middleware
async def measure(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Meter the routes that have a name; the name is their `api` label."""
    api = request.match_info.route.name
    if api is None:
        return await handler(request)
    with RequestMeter(request.app[METRICS], api, request[RECORD]) as meter:
        request[METER] = meter
        return await handler(request)
