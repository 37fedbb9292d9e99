"""Everything ragcache raises on purpose.

RagcacheError
├── ConfigError                  an option that cannot be honoured; ends the start-up
│   └── UnsupportedModel         a model whose answers would be silently wrong
└── RequestError                 one request fails, with an HTTP status
    ├── InvalidRequest           400
    │   └── ContextLengthExceeded
    ├── Unauthorized             401
    ├── NotFound                 404
    │   └── ModelNotFound
    ├── SlowReader               408, the client is too far behind its stream
    ├── Overloaded               429, the queue is full
    │   └── TenantOverloaded     429, the tenant's share of it is
    ├── GenerationFailed         500, the model could not answer this one
    ├── ReplicaLost              502, the replica that was answering
    ├── QueueTimeout             503, waited too long to begin
    ├── RequestTimeout           504, ran too long
    └── EngineUnavailable        503, still loading, or the engine has stopped
        └── ShuttingDown
"""

from __future__ import annotations

from typing import ClassVar


class RagcacheError(Exception):
    """Base class of all errors that ragcache raises on purpose."""


class ConfigError(RagcacheError):
    """An option, or a combination of options, that cannot be honoured."""


class UnsupportedModel(ConfigError):
    """A model that would give wrong answers on the paged cache; the message says why."""


class RequestError(RagcacheError):
    """A request that fails; `param` names the field, `code` is machine-readable.

    `retry_after`, in seconds, is set where the same request may succeed later. A `final` error is
    one that would only come again, though its status makes clients retry.
    """

    status: ClassVar[int] = 500
    default_code: ClassVar[str | None] = None
    retry_after: int | None = None
    final: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        if retry_after is not None:
            self.retry_after = retry_after


class InvalidRequest(RequestError):
    """The request is malformed, or asks for something that is not supported."""

    status = 400


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room for a single output token."""

    default_code = "context_length_exceeded"


class Unauthorized(RequestError):
    """No API key, or an unknown one."""

    status = 401
    default_code = "invalid_api_key"


class NotFound(RequestError):
    """No such route or resource."""

    status = 404


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""

    default_code = "model_not_found"


class SlowReader(RequestError):
    """The client reads its stream so slowly that too much of it has piled up."""

    status = 408
    default_code = "slow_reader"
    final = True


class Overloaded(RequestError):
    """The queue is full."""

    status = 429
    default_code = "rate_limit_exceeded"
    retry_after = 1


class TenantOverloaded(Overloaded):
    """A tenant has as many requests under way as it may have; others may go on."""

    default_code = "tenant_limit"


class GenerationFailed(RequestError):
    """The model gave no usable output for this request; others go on."""

    default_code = "generation_failed"


class ReplicaLost(RequestError):
    """The replica that had the request broke off, or went silent."""

    status = 502
    default_code = "replica_lost"


class QueueTimeout(RequestError):
    """The request waited in the queue for too long, and was never begun."""

    status = 503
    default_code = "queue_timeout"
    retry_after = 5


class RequestTimeout(RequestError):
    """The request was begun, and took too long."""

    status = 504
    default_code = "request_timeout"
    final = True


class EngineUnavailable(RequestError):
    """The model is still loading, or the engine thread has stopped."""

    status = 503
    default_code = "engine_unavailable"
    retry_after = 5


class ShuttingDown(EngineUnavailable):
    """The server has been told to stop; another one may take over."""

    default_code = "shutting_down"
