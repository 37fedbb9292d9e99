"""The gateway's chat route without HTTP, for callers in the same process.

Bodies go through the same checks, the same rendering and the same words as those that arrive over
a socket, so an agent can move between the two without noticing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from ragcache.config import ServeSettings
from ragcache.gateway.bodies import off_loop, parse
from ragcache.gateway.explanations import extension
from ragcache.gateway.openai.format import ChatReply, Choice
from ragcache.gateway.openai.schema import ChatCompletionRequest
from ragcache.gateway.operations import model_body

if TYPE_CHECKING:
    from ragcache.serving import Serving
    from ragcache.serving.generation import Generation

Json = dict[str, Any]


class EmbeddedGateway:
    """One engine in this process; its methods may be used from any event loop.

    Every request raises `RequestError` where the HTTP route would answer with an error.
    """

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    @classmethod
    def load(cls, model: str | None = None, **options: Any) -> Self:
        """Load a model with the options of `ragcache serve`; takes seconds to minutes.

        Raises:
            ValueError: for an unknown option or a wrong value, naming it.
            ConfigError: for one that cannot be honoured.
        """
        # Before torch is imported: its threads then wait asleep and leave the cores to the caller.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from ragcache.loading import load_serving

        # A program that asks itself for much may well wait for it.
        patient = {"queue_timeout": math.inf, "request_timeout": math.inf}
        return cls(load_serving(ServeSettings(model=model, **{**patient, **options})))

    @property
    def fingerprint(self) -> str:
        """Of the weights: engines with the same one give the same answers."""
        return self.serving.model.fingerprint

    def __deepcopy__(self, memo: object) -> Self:
        """The same engine: copies of a chat model share it."""
        return self

    def __reduce__(self) -> str:
        """Pickling says what to do instead."""
        raise TypeError(
            "an engine that runs in this process cannot be pickled; give its options instead"
        )

    def models(self) -> list[Json]:
        """The entries of GET /v1/models; the first is the canonical name."""
        return [model_body(self.serving, name) for name in self.serving.model_names]

    async def complete(self, body: Mapping[str, Any]) -> Json:
        """The response of POST /v1/chat/completions."""
        request, reply, generation = await self._start(body)
        choices = [Choice(index) for index in range(request.n)]
        async with aclosing(generation):
            async for delta in generation:
                choices[delta.index].add(delta)
        return reply.body(choices, generation.usage)

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Json]:
        """The chunks of the same with `stream`; leaving early aborts the generation."""
        _, reply, generation = await self._start({**body, "stream": True})
        async with aclosing(generation):
            async for delta in generation:
                for chunk in reply.chunks(delta):
                    yield chunk
            for chunk in reply.closing(generation.usage):
                yield chunk

    async def count_tokens(self, body: Mapping[str, Any]) -> int:
        """The prompt tokens of such a body."""
        (prompt,) = (await self._checked(body)).prompts()
        return await self.serving.count_tokens(prompt, tenant="")

    def close(self) -> None:
        """Stop the engine; requests that still run fail."""
        self.serving.close()

    async def _start(
        self, body: Mapping[str, Any]
    ) -> tuple[ChatCompletionRequest, ChatReply, Generation]:
        request = await self._checked(body)
        reply = ChatReply(request.model, include_usage=request.include_usage)
        (generate,) = request.requests(reply.id, tenant="")
        generation = await self.serving.start(generate)
        if request.ragcache.explain:
            block_size = self.serving.stats().block_size
            reply.extension = lambda: extension(generation.explanation, block_size)
        return request, reply, generation

    async def _checked(self, body: Mapping[str, Any]) -> ChatCompletionRequest:
        raw = json.dumps(body).encode()
        request = await off_loop(len(raw), partial(parse, ChatCompletionRequest, raw))
        self.serving.check_name(request.model)
        return request
