"""What goes wrong, as LangChain's exceptions."""

from __future__ import annotations

from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelPermissionDeniedError,
    ModelRateLimitError,
    ModelTimeoutError,
)

_BY_STATUS: dict[int, type[ModelError]] = {
    401: ModelAuthenticationError,
    403: ModelPermissionDeniedError,
    404: ModelNotFoundError,
    408: ModelTimeoutError,
    429: ModelRateLimitError,
    504: ModelTimeoutError,
}


class Refused(Exception):
    """The gateway's answer to a request was an error.

    `retry_after`, in seconds, is set where the gateway says when to come again.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after

    def as_model_error(self) -> ModelError:
        """The exception that LangChain has for this."""
        if self.code == "context_length_exceeded":
            return ContextOverflowError(str(self))
        usual = ModelAPIError if self.status >= 500 else ModelInvalidRequestError
        return _BY_STATUS.get(self.status, usual)(str(self))


class Unreachable(Refused):
    """No answer, or only a part of one, came back."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message)

    def as_model_error(self) -> ModelError:
        """See `Refused`."""
        return ModelConnectionError(str(self))
