"""The engine's tokens as an answer: text, calls, log-probabilities, usage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ragcache.breakpoints import PlacedBreakpoints
from ragcache.engine.bridge import Subscription
from ragcache.prompt.calls import CallParser
from ragcache.prompt.layout import TokenizedPrompt
from ragcache.prompt.stops import StopStrings
from ragcache.prompt.tokenize import TokenizerPool
from ragcache.types import (
    Admitted,
    ChatPrompt,
    Delta,
    EngineEvent,
    Explanation,
    Finished,
    FinishReason,
    GenerateRequest,
    Prefilled,
    TextLogprob,
    Token,
    TokenLogprob,
    ToolCall,
    Usage,
)

log = logging.getLogger(__name__)


class Trail(Protocol):
    """Explains a prompt's hit, and learns that the prompt can be found from now on."""

    async def explain(self, hit_tokens: int) -> Explanation:
        """Why no more than `hit_tokens` were found."""

    def computed(self) -> None:
        """The prompt's KV is written."""


@dataclass(frozen=True, slots=True)
class Prompted:
    """A request on its way through the engine, with what is known of its prompt."""

    request: GenerateRequest
    prompt: TokenizedPrompt
    breakpoints: PlacedBreakpoints
    trail: Trail | None  # None with prefix caching off
    room: int  # output tokens that fit in the context behind the prompt


class Generation:
    """The answer to one request: an asynchronous iterator of deltas, to be iterated once.

    Every choice gets exactly one delta with a finish reason. `usage` is final once the iteration
    has ended; its cached and written tokens and `explanation` are known once `admitted` is set,
    which is before the first delta. `aclose` must be called when the iteration is left early.
    """

    def __init__(
        self, prompted: Prompted, subscription: Subscription, tokenizer: TokenizerPool
    ) -> None:
        self.id = prompted.request.id
        self.explanation: Explanation | None = None
        self.admitted = asyncio.Event()  # or ended without ever being admitted
        self._prompted = prompted
        self._tokenizer = tokenizer
        self._subscription = subscription
        self._hit_tokens = 0
        self._written: Mapping[str, int] = {}
        n = prompted.request.sampling.n
        self._choices = [_Choice(prompted, tokenizer) for _ in range(n)]

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self._prompted.prompt.token_ids)

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        return Usage(self.prompt_tokens, self._hit_tokens, completion_tokens, self._written)

    def breakpoint_outcomes(self) -> list[tuple[str, str]]:
        """Origin and outcome of each cache marker, see `PlacedBreakpoints.outcomes`."""
        return list(self._prompted.breakpoints.outcomes(self._hit_tokens))

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            async for events in self._subscription:
                for event in events:
                    if isinstance(event, Admitted):
                        await self._admit(event.cached_tokens)
                    for delta in self._deltas(event):
                        yield delta
        finally:
            self.admitted.set()

    async def aclose(self) -> None:
        """Abort what still runs; closing again does nothing."""
        self._subscription.close()

    async def _admit(self, hit_tokens: int) -> None:
        self._hit_tokens = hit_tokens
        if self._prompted.trail is not None:
            self.explanation = await self._prompted.trail.explain(hit_tokens)
            self._written = self._prompted.breakpoints.written(hit_tokens)
        log.info("%s: %s", self.id, _told(self.usage, self.explanation))
        self.admitted.set()

    def _deltas(self, event: EngineEvent) -> Iterator[Delta]:
        if isinstance(event, Prefilled):
            if self._prompted.trail is not None:
                self._prompted.trail.computed()
            if self._prompted.request.echo:
                yield from self._echo(event)
        elif isinstance(event, Token | Finished) and (delta := self._advance(event)):
            yield delta

    def _echo(self, event: Prefilled) -> Iterator[Delta]:
        logprobs: tuple[TextLogprob, ...] = ()
        if self._prompted.request.sampling.prompt_logprobs is not None:
            first = _text_logprob(self._tokenizer, self._prompted.prompt.token_ids[0], None)
            rest = (_readable(self._tokenizer, logprob) for logprob in event.logprobs)
            logprobs = (first, *rest)
        for index in range(len(self._choices)):
            yield Delta(index, self._prompted.prompt.text, logprobs)

    def _advance(self, event: Token | Finished) -> Delta | None:
        choice = self._choices[event.index]
        if choice.ended:
            return None  # what the engine did before it learned that the text was complete
        if isinstance(event, Finished):
            return choice.end(event)
        delta = choice.push(event)
        if choice.ended:
            self._subscription.finish(event.index)
        return delta


@dataclass(slots=True)
class _Piece:
    """What a stretch of output says, split into content and calls."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    stop: str | None = None


class _Choice:
    """Text, calls, stop strings and token count of one choice."""

    def __init__(self, prompted: Prompted, tokenizer: TokenizerPool) -> None:
        request = prompted.request
        self.num_tokens = 0
        self.ended = False
        self._prompted = prompted
        self._tokenizer = tokenizer
        self._parser: CallParser | None = None
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else ()
        if tools and request.output.tool_choice != "none":
            self._parser = CallParser(tokenizer.tool_format, tools, prefix=prompted.prompt.text)
        visible = tokenizer.tool_format.markers if self._parser else ()
        self._detokenizer = tokenizer.detokenizer(visible)
        self._stops = StopStrings(request.stop)
        self._num_calls = 0

    def push(self, event: Token) -> Delta | None:
        """What a token completes; None while it has to be held back."""
        self.num_tokens += 1
        piece = self._read(self._detokenizer.push([event.token_id]))
        self.ended = piece.stop is not None
        logprobs = () if event.logprob is None else (_readable(self._tokenizer, event.logprob),)
        if not (piece.text or piece.calls or logprobs or self.ended):
            return None
        reason = self._stopped() if self.ended else None
        return Delta(event.index, piece.text, logprobs, reason, tuple(piece.calls), piece.stop)

    def end(self, event: Finished) -> Delta:
        """The rest of the text and the finish reason."""
        self.ended = True
        self.num_tokens = event.num_tokens
        piece = self._read(self._detokenizer.finish(), last=True)
        reason = self._stopped() if piece.stop is not None else self._reason(event)
        return Delta(event.index, piece.text, (), reason, tuple(piece.calls), piece.stop)

    def _read(self, text: str, *, last: bool = False) -> _Piece:
        piece = _Piece()
        if self._parser is not None:
            text, piece.calls = self._parser.push(text)
            if last:
                rest, calls = self._parser.finish()
                text, piece.calls = text + rest, piece.calls + calls
        piece.text, piece.stop = self._stops.push(text)
        if piece.stop is not None:
            piece.calls = []  # they came behind the end
        elif last:
            piece.text += self._stops.finish()
        piece.calls = self._allowed(piece.calls)
        return piece

    def _allowed(self, calls: list[ToolCall]) -> list[ToolCall]:
        if not self._prompted.request.output.parallel_tool_calls:
            calls = calls[: 1 - min(self._num_calls, 1)]
        self._num_calls += len(calls)
        return calls

    def _reason(self, event: Finished) -> FinishReason:
        if event.reason is FinishReason.STOP:
            return self._stopped()
        wanted = self._prompted.request.sampling.max_tokens
        cut = event.reason is FinishReason.LENGTH
        if cut and (wanted is None or wanted > self._prompted.room):
            return FinishReason.CONTEXT
        return event.reason

    def _stopped(self) -> FinishReason:
        return FinishReason.TOOL_CALLS if self._num_calls else FinishReason.STOP


def _readable(tokenizer: TokenizerPool, logprob: TokenLogprob) -> TextLogprob:
    top = tuple(_text_logprob(tokenizer, token, value) for token, value in logprob.top)
    return _text_logprob(tokenizer, logprob.token_id, logprob.logprob, top)


def _text_logprob(
    tokenizer: TokenizerPool,
    token_id: int,
    value: float | None,
    top: tuple[TextLogprob, ...] = (),
) -> TextLogprob:
    text, raw = tokenizer.token_text(token_id)
    return TextLogprob(text, raw, value, top)


def _told(usage: Usage, explanation: Explanation | None) -> str:
    """One line about a prompt's hit, without any of its text."""
    line = f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens from the cache"
    if explanation is None or explanation.reason is None:
        return line
    line += f"; {explanation.reason}"
    if explanation.token is not None:
        line += f" in {explanation.segment} at token {explanation.token}"
    if explanation.character is not None:
        line += f" (character {explanation.character})"
    if explanation.previous is not None:
        line += f", compared with {explanation.previous}"
    return f"{line}, {explanation.lost_tokens} tokens lost"
