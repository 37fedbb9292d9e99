"""The tokens of what was sent, for figures that a server does not report."""

from __future__ import annotations

from typing import Self

from transformers import PreTrainedTokenizerFast

from ragcache.bench.client import ChatMessages
from ragcache.engine.source import find_model
from ragcache.prompt.loader import load_tokenizer
from ragcache.prompt.tokenize import PromptTokenizer
from ragcache.types import ChatPrompt, Message


class ChatTokenizer:
    """A model's tokenizer and chat template, as the gateway uses them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._prompts = PromptTokenizer(tokenizer)

    @classmethod
    def load(cls, model: str | None) -> Self:
        """From a hub id, a folder or a GGUF file; None is the embedded model.

        Raises ConfigError when there is no such file, or no embedded model.
        """
        return cls(load_tokenizer(find_model(model).location))

    def prompt_ids(self, messages: ChatMessages) -> list[int]:
        """Tokens of the rendered conversation, up to where the answer begins."""
        conversation = tuple(Message(each["role"], each["content"]) for each in messages)
        return self._prompts.encode_chat(ChatPrompt(conversation)).token_ids

    def text_ids(self, text: str) -> list[int]:
        """Tokens of an answer."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))
