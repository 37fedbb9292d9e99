"""Token ids as text and as bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders

from ragcache.errors import ConfigError


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


BYTE_ALPHABET = _byte_alphabet()
BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}


class Vocabulary:
    """How the tokens of one tokenizer read. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.num_ids = 1 + max(tokenizer.get_vocab().values())  # every id is below it
        self._special = {id for id, token in added.items() if token.special}
        self._bytes: dict[int, bytes] = {}  # filled as tokens turn up
        self._anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        decoder = tokenizer.decoder.__getstate__() if tokenizer.decoder else b""
        self.is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._has_byte_tokens = b"ByteFallback" in decoder
        if b"ByteLevel" in decoder and not self.is_byte_level:
            raise ConfigError(f"cannot stream text from a tokenizer with this decoder: {decoder!r}")

    def showing(self, tokens: Iterable[str]) -> Vocabulary:
        """The same vocabulary, in which these special tokens read as text."""
        shown = copy.copy(self)
        shown._special = self._special.difference(map(self._tokenizer.token_to_id, tokens))
        return shown

    def is_skipped(self, token_id: int) -> bool:
        """Whether decoding leaves a token out: a special one, or an id without a token."""
        return token_id in self._special or self._tokenizer.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Whether this is a byte token, of a character that has no token of its own.

        Decoding reads a run of them as a whole: as UTF-8, or else as one U+FFFD for each.
        """
        return self._has_byte_tokens and self._tokenizer.id_to_token(token_id) in BYTE_TOKENS

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        kept = [id for id in token_ids if id not in self._special]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text, maybe only a part of a character.

        Special tokens read as their names, ids without a token as nothing.
        """
        if (known := self._bytes.get(token_id)) is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token as text, U+FFFD for a part of a character, and as UTF-8 bytes."""
        raw = self.token_bytes(token_id)
        return raw.decode("utf-8", "replace"), raw

    def _read_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            return _from_byte_alphabet(token)
        if self.is_byte(token_id):
            return bytes([BYTE_TOKENS[token]])
        return self._text_behind_anchor(token_id).encode()

    def _text_behind_anchor(self, token_id: int) -> str:
        """What a token reads as inside a text: many decoders trim the beginning."""
        before, both = (
            self._tokenizer.decode(ids, skip_special_tokens=False)
            for ids in (self._anchor, [*self._anchor, token_id])
        )
        return both[len(before) :]


def _from_byte_alphabet(token: str) -> bytes:
    try:
        return bytes(BYTE_ALPHABET[char] for char in token)
    except KeyError:  # an added token, which is ordinary text
        return token.encode()
