"""Tokens as block keys, and the SHA-256 names of namespaces and blocks.

Inside one process a block is found by its exact tokens (its key); no hash decides a match. Its
name is what other processes know it by: a digest chained over its parents, the same in every
process on every machine.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate

OWNER_BYTES = 32  # of a name made by `owner_name`


def owner_name(*fields: str | None) -> bytes:
    """Name whose cache it is: model fingerprint, tenant.

    Fields are framed by their length, so neighbours cannot run together, and an absent field
    differs from an empty one. Returns `OWNER_BYTES` bytes.
    """
    digest = hashlib.sha256()
    for field in fields:
        data = b"" if field is None else field.encode()
        frame = 0 if field is None else len(data) + 1
        digest.update(frame.to_bytes(8, "little") + data)
    return digest.digest()


def namespace_name(owner: bytes, salt: str | None = None) -> bytes:
    """Name what may share a cache: requests of one owner with one salt, or without any.

    Returns 64 bytes that begin with `owner`, so that all of an owner's namespaces can be told.
    """
    return owner + owner_name(salt)


def block_name(parent: bytes, key: bytes) -> bytes:
    """Name the block with the tokens `key` after `parent`, a block or a namespace; 32 bytes."""
    return hashlib.sha256(parent + key).digest()


def block_names(namespace: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Name the whole blocks of a prompt in a namespace, first to last."""
    keys = block_keys(tokens, 0, len(tokens) // block_size, block_size)
    return list(accumulate(keys, block_name, initial=namespace))[1:]


def block_keys(tokens: Sequence[int], first: int, stop: int, block_size: int) -> Iterator[bytes]:
    """Yield the keys of the whole blocks `first` to `stop` - 1: little-endian int32 tokens.

    Tokens are packed all at once, when the first key is asked for: cutting keys out of the bytes
    is many times cheaper than packing block by block.
    """
    data = pack(tokens[first * block_size : stop * block_size])
    for (key,) in struct.iter_unpack(f"{4 * block_size}s", data):
        yield key


def pack(tokens: Sequence[int]) -> bytes:
    """Write tokens as little-endian int32, four bytes each; an array of them is copied as it is."""
    if isinstance(tokens, array) and tokens.itemsize == 4 and sys.byteorder == "little":
        return tokens.tobytes()
    return struct.Struct(f"<{len(tokens)}i").pack(*tokens)  # half the time of `struct.pack`


def shared_blocks(a: Sequence[int], b: Sequence[int], block_size: int) -> int:
    """Count the leading whole blocks in which two token lists (of one type) are equal."""
    whole = min(len(a), len(b)) // block_size
    shared = 0
    for stride in (64, 1):  # coarse, then fine: the slices compare in C
        while shared + stride <= whole:
            tokens = slice(shared * block_size, (shared + stride) * block_size)
            if a[tokens] != b[tokens]:
                break
            shared += stride
    return shared
