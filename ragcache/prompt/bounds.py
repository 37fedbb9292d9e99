"""How few tokens a text can possibly have, known without encoding it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from ragcache.prompt.vocabulary import BYTE_ALPHABET, BYTE_TOKENS

_NFC_FACTOR = 4  # NFC composes at most four characters into one
_KEEPS_TEXT = {"Sequence", "NFC", "Prepend", "ByteLevel", "Metaspace", "Digits", "Punctuation"}


class LengthBound:
    """A lower bound on the number of tokens of a text.

    It is zero for a tokenizer that can drop text, shorten it by an unknown factor, or read a
    stretch of any length as one unknown token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._lost: tuple[str, ...] = ()  # characters without tokens
        self._chars_per_token = 0  # the most that one token can stand for; 0 if not known
        parts = [*_parts(tokenizer.normalizer), *_parts(tokenizer.pre_tokenizer)]
        if not all(map(_keeps_text, parts)) or _has_greedy_tokens(tokenizer):
            return
        is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
        missing = {
            byte
            for token, byte in (BYTE_ALPHABET if is_byte_level else BYTE_TOKENS).items()
            if tokenizer.token_to_id(token) is None
        }
        # Every character has a byte below 0xC0 in UTF-8. A byte without token is just left out
        # by byte-level BPE; by byte fallback, the whole character becomes an unknown token.
        if is_byte_level and not any(0x80 <= byte < 0xC0 for byte in missing):
            self._lost = tuple(chr(byte) for byte in missing if byte < 0x80)
        elif missing or not getattr(tokenizer.model, "byte_fallback", False):
            return
        factor = _NFC_FACTOR if any(part["type"] == "NFC" for part in parts) else 1
        self._chars_per_token = factor * max(map(len, tokenizer.get_vocab()))

    def min_tokens(self, text: str) -> int:
        """`text` has at least so many tokens."""
        if not self._chars_per_token:
            return 0
        num_chars = len(text) - sum(map(text.count, self._lost))
        return -(-num_chars // self._chars_per_token)


def _keeps_text(part: dict[str, Any]) -> bool:
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(pattern) <= len(part["content"])
    if part["type"] == "Split":
        return bool(part["behavior"] != "Removed")
    return part["type"] in _KEEPS_TEXT


def _has_greedy_tokens(tokenizer: Tokenizer) -> bool:
    """Whether an added token takes all the white space around it, however long."""
    return any(t.lstrip or t.rstrip for t in tokenizer.get_added_tokens_decoder().values())


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """The serialized form of a part of a tokenizer and of the parts that it is made of."""
    if part is not None:
        yield from _nested(json.loads(part.__getstate__()))


def _nested(state: Any) -> Iterator[dict[str, Any]]:
    if isinstance(state, dict) and "type" in state:
        yield state
    for child in state.values() if isinstance(state, dict) else state:
        if isinstance(child, dict | list):
            yield from _nested(child)
