"""Prompts to token ids, off the event loop."""

from __future__ import annotations

import asyncio
import copy
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from ragcache.errors import ContextLengthExceeded, InvalidRequest
from ragcache.prompt.bounds import LengthBound
from ragcache.prompt.detokenize import Detokenizer
from ragcache.prompt.encoder import Encoder, Piece
from ragcache.prompt.layout import ChatTokens, PlainPrompt, RenderedChat, TokenizedPrompt
from ragcache.prompt.template import ChatTemplate, require_encodable
from ragcache.prompt.threads import background_threads
from ragcache.prompt.tool_format import ToolFormat
from ragcache.prompt.vocabulary import Vocabulary
from ragcache.types import ChatPrompt

T = TypeVar("T")

_LARGE = 1 << 20  # characters; some tenths of a second of work
_SMALL = 1 << 14  # characters; rendered in half a millisecond
_FEW = 1 << 10  # characters; encoded in half a millisecond
_VALUE_SIZE = 16  # characters that a value in a tool or call costs besides its own


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
        _keep_whole_spans(backend.post_processor)
        self.template = ChatTemplate(tokenizer)
        self.vocabulary = Vocabulary(backend)
        special_texts = map(str, tokenizer.special_tokens_map.values())
        template_text = "\0".join([self.template.source, *special_texts])
        self._encoder = Encoder(backend, self.vocabulary, self.template.control, template_text)
        self._length_bound = LengthBound(backend)

    def encode_chat(
        self, prompt: ChatPrompt, max_tokens: int | None = None, scope: str = ""
    ) -> TokenizedPrompt:
        """Render and encode a conversation, with the generation prompt at its end.

        Encodings of its parts are remembered for prompts of the same `scope`.
        Control tokens in the client's strings are ordinary text. Raises InvalidRequest for what
        the chat template cannot render, ContextLengthExceeded for more than `max_tokens` tokens,
        without encoding where the length of the text leaves no doubt.
        """
        return self.encode_rendered(self.render(prompt), max_tokens, scope)

    def render(self, prompt: ChatPrompt) -> RenderedChat:
        """The first half of `encode_chat`."""
        conversation = self.template.prepare(prompt)
        rendered = self.template.render(conversation)
        return RenderedChat(prompt, conversation, rendered)

    def encode_at_hand(
        self, chat: RenderedChat, new: int, max_tokens: int | None = None, scope: str = ""
    ) -> TokenizedPrompt | None:
        """The second half of `encode_chat` where all but `new` characters are remembered."""
        pieces = self._encoder.pieces_at_hand(chat.rendered, new, scope)
        return None if pieces is None else self._put_together(chat, pieces, max_tokens, scope)

    def encode_rendered(
        self, chat: RenderedChat, max_tokens: int | None = None, scope: str = ""
    ) -> TokenizedPrompt:
        """The second half of `encode_chat`."""
        text = self.template.control.unmark(chat.rendered)
        self._refuse_certain_excess(text, max_tokens, "messages")
        pieces = self._encoder.pieces(chat.rendered, scope)
        return self._put_together(chat, pieces, max_tokens, scope)

    def _put_together(
        self, chat: RenderedChat, pieces: list[Piece], max_tokens: int | None, scope: str
    ) -> TokenizedPrompt:
        packed = array("I")
        for piece in pieces:
            packed.extend(piece.ids)
        _refuse_excess(len(packed), max_tokens, "messages")
        return ChatTokens(
            token_ids=packed.tolist(),
            text="".join(piece.text for piece in pieces),
            chat=chat,
            ids=packed,
            pieces=pieces,
            template=self.template,
            encoder=self._encoder,
            scope=scope,
        )

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
        find_character = partial(self._encoder.find_raw_character, text, ids)
        return PlainPrompt(ids, text, find_character)

    def read_tokens(self, token_ids: Sequence[int]) -> TokenizedPrompt:
        """A prompt that was given as token ids; special ones read as their names."""
        text = self._read(token_ids)
        return PlainPrompt(list(token_ids), text, lambda token: len(self._read(token_ids[:token])))

    def _read(self, token_ids: Iterable[int]) -> str:
        return b"".join(map(self.vocabulary.token_bytes, token_ids)).decode("utf-8", "replace")

    def _refuse_certain_excess(self, text: str, max_tokens: int | None, param: str) -> None:
        if max_tokens is not None and len(text) > max_tokens:
            _refuse_excess(self._length_bound.min_tokens(text), max_tokens, param, "at least ")


class TokenizerPool:
    """A PromptTokenizer on a few threads of its own, for use from an event loop.

    Large prompts have a single thread to themselves, so that the others never wait for them. So
    have the places of tokens: requests that run already ask for these.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, workers: int = 2) -> None:
        self.prompts = PromptTokenizer(tokenizer)
        self._threads = background_threads(workers, "tokenizer")
        self._large = background_threads(1, "tokenizer-large")
        self._places = background_threads(1, "tokenizer-places")

    @property
    def tool_format(self) -> ToolFormat:
        """The form in which the model makes tool calls."""
        return self.prompts.template.tool_format

    @property
    def num_ids(self) -> int:
        """All token ids that encoding may give are below it."""
        return self.prompts.vocabulary.num_ids

    async def encode_chat(
        self, prompt: ChatPrompt, max_tokens: int | None = None, scope: str = ""
    ) -> TokenizedPrompt:
        """`PromptTokenizer.encode_chat`; on a thread, and with the layout, where that takes long.

        Most prompts go on from one that is remembered. Such a prompt is encoded before a thread
        would have begun, on a machine that is busy with a model.
        """
        size = _chat_size(prompt)
        if size > _SMALL:
            encode = self.prompts.encode_chat
            return await self._run(size > _LARGE, _with_layout, encode, prompt, max_tokens, scope)
        chat = self.prompts.render(prompt)
        if at_hand := self.prompts.encode_at_hand(chat, _FEW, max_tokens, scope):
            return at_hand
        finish = self.prompts.encode_rendered
        return await self._run(False, _with_layout, finish, chat, max_tokens, scope)

    async def count_tokens(
        self, prompt: ChatPrompt, max_tokens: int | None = None, scope: str = ""
    ) -> int:
        """How many tokens `encode_chat` finds; needs no layout."""
        encode = self.prompts.encode_chat
        is_large = _chat_size(prompt) > _LARGE
        encoded = await self._run(is_large, encode, prompt, max_tokens, scope)
        return len(encoded.token_ids)

    async def encode_text(self, text: str, max_tokens: int | None = None) -> TokenizedPrompt:
        """`PromptTokenizer.encode_text` on a thread."""
        return await self._run(_is_large(text), self.prompts.encode_text, text, max_tokens)

    async def read_tokens(self, token_ids: Sequence[int]) -> TokenizedPrompt:
        """`PromptTokenizer.read_tokens` on a thread."""
        return await self._run(_is_large(token_ids), self.prompts.read_tokens, token_ids)

    async def place(self, prompt: TokenizedPrompt, token: int) -> tuple[str, int]:
        """`TokenizedPrompt.place` on a thread."""
        if _is_large(prompt.text):
            return await self._run(True, prompt.place, token)
        return await asyncio.get_running_loop().run_in_executor(self._places, prompt.place, token)

    def detokenizer(self, visible: Collection[str] = ()) -> Detokenizer:
        """A new detokenizer, for one choice; `visible` special tokens are part of its text."""
        return Detokenizer.of(self.prompts.vocabulary, visible)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token as text, U+FFFD for a part of a character, and as UTF-8 bytes."""
        return self.prompts.vocabulary.token_text(token_id)

    def close(self) -> None:
        """End the threads; prompts that still wait for one are dropped."""
        for threads in (self._threads, self._large, self._places):
            threads.shutdown(cancel_futures=True)

    async def _run(self, is_large: bool, work: Callable[..., T], *args: object) -> T:
        threads = self._large if is_large else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work, *args)


def _is_large(prompt: Sized) -> bool:
    return len(prompt) > _LARGE


def _with_layout(encode: Callable[..., TokenizedPrompt], *args: object) -> TokenizedPrompt:
    encoded = encode(*args)
    encoded.layout()  # is kept
    return encoded


def _chat_size(prompt: ChatPrompt) -> int:
    """The characters of a conversation, or at least more than `_LARGE` of them.

    Iterative and ended early, since it runs on the event loop with what a client sent.
    """
    messages = ([m.content, m.name, m.tool_calls] for m in prompt.messages)
    rest: list[Any] = [*messages, prompt.tools, prompt.template_options]
    size = 0
    while rest and size <= _LARGE:
        value = rest.pop()
        size += _VALUE_SIZE + (len(value) if isinstance(value, str) else 0)
        if isinstance(value, Mapping):
            rest += chain.from_iterable(value.items())
        elif isinstance(value, list | tuple):
            rest += value
    return size


def _keep_whole_spans(post_processor: Any) -> None:
    """Let the span of a token include its white space, which it depends on."""
    is_sequence = isinstance(post_processor, processors.Sequence)
    for processor in post_processor if is_sequence else [post_processor]:
        if hasattr(processor, "trim_offsets"):
            processor.trim_offsets = False


def _refuse_excess(
    num_tokens: int, max_tokens: int | None, param: str, qualifier: str = ""
) -> None:
    if max_tokens is not None and num_tokens > max_tokens:
        raise ContextLengthExceeded(
            f"prompt is too long: {qualifier}{num_tokens} tokens, the maximum is {max_tokens}",
            param=param,
        )
