"""One choice of an answer: tokens in; text, calls and the end out."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragcache.prompt.calls import CallParser
from ragcache.prompt.stops import StopStrings
from ragcache.prompt.tokenize import TokenizerPool
from ragcache.serving.prompted import Prompted
from ragcache.types import (
    ChatPrompt,
    Delta,
    Finished,
    FinishReason,
    TextLogprob,
    Token,
    TokenLogprob,
    ToolCall,
)


@dataclass(slots=True)
class _Piece:
    """What a stretch of output says, split into content and calls."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    stop: str | None = None


class Choice:
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
        logprobs = () if event.logprob is None else (readable(self._tokenizer, event.logprob),)
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


def readable(tokenizer: TokenizerPool, logprob: TokenLogprob) -> TextLogprob:
    """A log-probability with its tokens as text."""
    top = tuple(text_logprob(tokenizer, token, value) for token, value in logprob.top)
    return text_logprob(tokenizer, logprob.token_id, logprob.logprob, top)


def text_logprob(
    tokenizer: TokenizerPool,
    token_id: int,
    value: float | None,
    top: tuple[TextLogprob, ...] = (),
) -> TextLogprob:
    """The log-probability `value` of a token, as text."""
    text, raw = tokenizer.token_text(token_id)
    return TextLogprob(text, raw, value, top)
