"""The serving behind the routes, which may still be loading."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from ragcache.errors import EngineUnavailable, RagcacheError
from ragcache.types import EngineStats

if TYPE_CHECKING:
    from ragcache.serving import Serving


class Backend:
    """A `Serving` that arrives later: the server answers from its first second."""

    def __init__(self, loading: asyncio.Future[Serving]) -> None:
        self.loading = loading
        self.draining = False

    def ready(self) -> str | None:
        """None when requests will be answered, else the reason why not."""
        if self.draining:
            return "the server is shutting down"
        if not self.loading.done():
            return "the model is loading"
        if self.loading.cancelled():
            return "loading the model was cancelled"
        if error := self.loading.exception():
            # Our own errors are meant to be read; others may tell what is nobody's business.
            why = str(error) if isinstance(error, RagcacheError) else "the server's log tells why"
            return f"loading the model failed: {why}"
        return self.loading.result().ready()

    def interrupt(self) -> None:
        """Let all requests under way fail now."""
        if self.loaded is not None:
            self.loaded.interrupt()

    @property
    def serving(self) -> Serving:
        """The loaded serving; raises EngineUnavailable with the reason before that."""
        if (serving := self.loaded) is None:
            raise EngineUnavailable(f"not ready: {self.ready()}")
        return serving

    def serving_model(self, name: str) -> Serving:
        """The serving of the model that a client calls `name`; raises ModelNotFound too."""
        serving = self.serving
        serving.check_name(name)
        return serving

    @property
    def model_name(self) -> str:
        """The canonical served name, empty while the model is loading."""
        return self.loaded.model_names[0] if self.loaded else ""

    def stats(self) -> EngineStats | None:
        """A snapshot of the engine, None while the model is loading."""
        return self.loaded.stats() if self.loaded else None

    @property
    def loaded(self) -> Serving | None:
        """The serving, None while there is none."""
        loading = self.loading
        failed = not loading.done() or loading.cancelled() or loading.exception()
        return None if failed else loading.result()


BACKEND = web.AppKey("backend", Backend)
