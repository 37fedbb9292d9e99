"""Request bodies: bytes to a checked model, or one clear 400."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from aiohttp import hdrs, web
from pydantic import BaseModel, ValidationError

from ragcache.errors import InvalidRequest, Overloaded
from ragcache.gateway.tenants import TENANT

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")

ARRIVES_WITHIN = 60.0  # seconds, for all of a body
AT_ONCE = 4  # bodies of the largest size that are read and checked; half of them of one tenant
_OFF_LOOP = 2**15  # bytes; work on more than this would be felt by the running streams


class Intake:
    """Room for the bodies that are being read and checked, in bytes.

    Only then is it known which places a request needs; from there on these are the limit.
    """

    def __init__(self, max_body_size: int) -> None:
        self._limit = AT_ONCE * max_body_size
        self._taken: Counter[str] = Counter()  # by tenant

    @contextmanager
    def room(self, request: web.Request) -> Iterator[None]:
        """Take room for a body while the block runs; raises Overloaded where there is none."""
        largest, tenant = request.client_max_size, request[TENANT]
        announced = request.content_length
        size = largest if announced is None else min(announced, largest)
        taken = self._taken
        if taken.total() + size > self._limit or taken[tenant] + size > self._limit // 2:
            raise Overloaded("too much is being uploaded at once")
        taken[tenant] += size
        try:
            yield
        finally:
            taken[tenant] -= size


INTAKE = web.AppKey("intake", Intake)


async def read_body(request: web.Request, model: type[Body]) -> Body:
    """Read and check the JSON body.

    Raises InvalidRequest, and what `read_bytes` does.
    """
    raw = await read_bytes(request)
    return await off_loop(len(raw), partial(parse, model, raw))


async def off_loop(body_size: int, work: Callable[[], Result]) -> Result:
    """Do work that grows with the body, of so many bytes: in a thread, if it is a large one."""
    return await asyncio.to_thread(work) if body_size > _OFF_LOOP else work()


async def body_size(request: web.Request) -> int:
    """The length of the body in bytes."""
    return len(await request.read())  # aiohttp keeps what it has read


async def read_bytes(request: web.Request) -> bytes:
    """Read the body.

    Raises HTTPRequestEntityTooLarge, HTTPUnsupportedMediaType, HTTPRequestTimeout.
    """
    announced = request.content_length or 0
    if announced > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, announced)
    if coding := request.headers.get(hdrs.CONTENT_ENCODING):
        raise web.HTTPUnsupportedMediaType(text=f"Content-Encoding {coding} is not supported")
    try:
        async with asyncio.timeout(ARRIVES_WITHIN):
            return await request.read()
    except TimeoutError:
        text = f"the body did not arrive within {ARRIVES_WITHIN:g} s"
        raise web.HTTPRequestTimeout(text=text) from None


def parse(model: type[Body], raw: bytes) -> Body:
    """Check JSON text, which is UTF-8 whatever the charset says (RFC 8259, 8.1)."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = field_path(first["loc"])
        message = f"{param}: {first['msg']}" if param else first["msg"]
        raise InvalidRequest(message, param=param) from None


def field_path(loc: Sequence[int | str]) -> str | None:
    """`("messages", 0, "role")` as `messages[0].role`."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc]
    return "".join(step for step in steps if step != ".[key]").lstrip(".") or None
