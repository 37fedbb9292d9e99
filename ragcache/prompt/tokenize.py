"""Prompts to token ids, off the event loop."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from transformers import PreTrainedTokenizerFast

from ragcache.errors import ContextLengthExceeded, InvalidRequest
from ragcache.prompt.bounds import LengthBound
from ragcache.prompt.detokenize import Detokenizer
from ragcache.prompt.encoder import Encoder
from ragcache.prompt.segments import Segment, outline
from ragcache.prompt.template import ChatTemplate, Conversation, require_encodable
from ragcache.prompt.vocabulary import Vocabulary
from ragcache.types import ChatPrompt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the engine takes it, and the text that its tokens are."""

    token_ids: list[int]
    text: str
    _find_segments: Callable[[], tuple[Segment, ...]] = field(repr=False, compare=False)

    def segments(self) -> tuple[Segment, ...]:
        """The named parts of the prompt, in order and without gaps.

        Found when asked for, at the cost of rendering the conversation once per message; for a
        long one that is work for a thread.
        """
        return self._find_segments()


class PromptTokenizer:
    """Prompts to tokens and back with one tokenizer. Safe to use from several threads.

    It works on its own copy, which nothing changes: a tokenizer that is used and changed at the
    same time raises "Already borrowed".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        backend = copy.deepcopy(tokenizer.backend_tokenizer)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False  # that is: parse them
        self.template = ChatTemplate(tokenizer)
        self.vocabulary = Vocabulary(backend)
        special_texts = map(str, tokenizer.special_tokens_map.values())
        template_text = "\0".join([self.template.source, *special_texts])
        self._encoder = Encoder(backend, self.template.control, template_text)
        self._length_bound = LengthBound(backend)

    def encode_chat(self, prompt: ChatPrompt, max_tokens: int | None = None) -> TokenizedPrompt:
        """Render and encode a conversation, with the generation prompt at its end.

        Control tokens in the client's strings are ordinary text. Raises InvalidRequest for what
        the chat template cannot render, ContextLengthExceeded for more than `max_tokens` tokens,
        without encoding where the length of the text leaves no doubt.
        """
        conversation = self.template.prepare(prompt)
        rendered = self.template.render(conversation)
        text = self.template.control.unmark(rendered)
        self._refuse_certain_excess(text, max_tokens, "messages")
        ids = self._encoder.encode(rendered)
        _refuse_excess(len(ids), max_tokens, "messages")
        return TokenizedPrompt(ids, text, partial(self._segments, conversation, rendered))

    def encode_text(self, text: str, max_tokens: int | None = None) -> TokenizedPrompt:
        """Encode raw text: special tokens in it are parsed, and the tokenizer adds its own.

        Raises InvalidRequest for no tokens at all, ContextLengthExceeded as `encode_chat` does.
        """
        require_encodable(text, "prompt")
        self._refuse_certain_excess(text, max_tokens, "prompt")
        ids = self._encoder.encode_raw(text)
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        _refuse_excess(len(ids), max_tokens, "prompt")
        return TokenizedPrompt(ids, text, lambda: (Segment("prompt", 0, len(ids)),))

    def _segments(self, conversation: Conversation, rendered: str) -> tuple[Segment, ...]:
        marks = outline(self.template, conversation, rendered)
        ends = self._encoder.count_tokens(rendered, [mark.end for mark in marks])
        starts = [0, *ends[:-1]]
        names = [mark.name for mark in marks]
        return tuple(map(Segment, names, starts, ends))

    def _refuse_certain_excess(self, text: str, max_tokens: int | None, param: str) -> None:
        _refuse_excess(self._length_bound.min_tokens(text), max_tokens, param, "at least ")


class TokenizerPool:
    """A PromptTokenizer on a few threads of its own, for use from an event loop."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, workers: int = 2) -> None:
        self.prompts = PromptTokenizer(tokenizer)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")

    @property
    def supports_tools(self) -> bool:
        """Whether the chat template renders tool definitions."""
        return self.prompts.template.supports_tools

    async def encode_chat(
        self, prompt: ChatPrompt, max_tokens: int | None = None
    ) -> TokenizedPrompt:
        """`PromptTokenizer.encode_chat` on a thread."""
        return await self._run(self.prompts.encode_chat, prompt, max_tokens)

    async def encode_text(self, text: str, max_tokens: int | None = None) -> TokenizedPrompt:
        """`PromptTokenizer.encode_text` on a thread."""
        return await self._run(self.prompts.encode_text, text, max_tokens)

    async def segments(self, prompt: TokenizedPrompt) -> tuple[Segment, ...]:
        """`TokenizedPrompt.segments` on a thread."""
        return await self._run(prompt.segments)

    def detokenizer(self) -> Detokenizer:
        """A new detokenizer, for one choice."""
        return Detokenizer.of(self.prompts.vocabulary)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token as text, U+FFFD for a part of a character, and as UTF-8 bytes."""
        return self.prompts.vocabulary.token_text(token_id)

    def close(self) -> None:
        """End the threads; prompts that still wait for one are dropped."""
        self._threads.shutdown(cancel_futures=True)

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


def _refuse_excess(
    num_tokens: int, max_tokens: int | None, param: str, qualifier: str = ""
) -> None:
    if max_tokens is not None and num_tokens > max_tokens:
        raise ContextLengthExceeded(
            f"prompt is too long: {qualifier}{num_tokens} tokens, the maximum is {max_tokens}",
            param=param,
        )
