"""Exceptions on their way to the client: a status, a message, a body."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import hdrs, web

from ragcache.errors import ContextLengthExceeded, RequestError

ANTHROPIC_ROUTE = "/v1/messages"  # and all below it

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# What a schema of this API is called where it is compiled, and here.
_ANTHROPIC_NAMES = {
    ".function.parameters": ".input_schema",
    "response_format": "output_config.format",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a client is told about an exception."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: Exception, request_id: str) -> Self:
        """Describe `error`; one that nobody raised on purpose is logged and not shown."""
        if isinstance(error, RequestError):
            return cls(error.status, error.message, error.param, error.code, _retry(error))
        if isinstance(error, web.HTTPException):
            return cls(error.status, error.text or error.reason, headers=_allowed(error))
        log.error("request %s failed", request_id, exc_info=error)
        return cls(500, f"internal error; the server's log has more under {request_id}")

    def body(self, path: str, request_id: str) -> dict[str, Any]:
        """The body in the shape of the API that `path` belongs to."""
        anthropics = path == ANTHROPIC_ROUTE or path.startswith(f"{ANTHROPIC_ROUTE}/")
        return self.anthropic(request_id) if anthropics else self.openai()

    @property
    def kind(self) -> str:
        """OpenAI's `type` of this failure."""
        if self.status >= 500:
            return "server_error"
        special = {401: "authentication_error", 429: "rate_limit_error"}
        return special.get(self.status, "invalid_request_error")

    def openai(self) -> dict[str, Any]:
        """The body on OpenAI's routes."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic(self, request_id: str) -> dict[str, Any]:
        """The body, or the data of an error event, on Anthropic's routes."""
        usual = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, usual)
        error = {"type": kind, "message": self._message_with_field()}
        if self.status in (429, 503) and self.code is not None:
            error["code"] = self.code  # not of this API; a router goes by it
        return {"type": "error", "error": error, "request_id": request_id}

    def _message_with_field(self) -> str:
        """The message behind the path of its field, for which these bodies have no other place."""
        param, message = self.param or "", self.message
        for ours, theirs in _ANTHROPIC_NAMES.items():
            if ours in param:
                param, message = param.replace(ours, theirs), message.replace(ours, theirs, 1)
        # Clients know an excessive prompt by how the message begins.
        as_it_is = self.code == ContextLengthExceeded.default_code or message.startswith(param)
        return message if as_it_is else f"{param}: {message}"


def _retry(error: RequestError) -> dict[str, str]:
    """When to come again; or not to, in the word that both APIs' own clients go by."""
    if error.final:
        return {"x-should-retry": "false"}
    return {} if error.retry_after is None else {hdrs.RETRY_AFTER: str(error.retry_after)}


def _allowed(error: web.HTTPException) -> dict[str, str]:
    """A 405 must name the methods that would do (RFC 9110, 15.5.6)."""
    return {hdrs.ALLOW: error.headers[hdrs.ALLOW]} if hdrs.ALLOW in error.headers else {}
