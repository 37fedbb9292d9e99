"""Fingerprints of prompts: enough to say where two prompts part, too little to read one."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from sys import intern

from ragcache.prefix.names import pack
from ragcache.types import Segment

SPAN = 4  # blocks that are hashed together: one by one costs most of a fingerprint
RESUMED = 16  # tokens, beside a block, in a row that show text to be the same again
NEAR = 1024  # tokens behind a difference in which such text has to begin
BYTES_PER_SEGMENT = 16
BYTES_PER_PREFIX = 160  # the number, and its entry in an index of prefixes
WIRE_ORDER = {"tools": 0, "system": 1, "messages": 2, "prompt": 2}


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """What is kept of a prompt: a hash of every whole span, and the low byte of every token.

    A span is a few blocks. The hashes are Python's own of `bytes`: keyed, and of no use outside
    this process. They decide which spans are equal; the low bytes, the lane, only say which token
    of a span differs. `generation` is what the taker counts by.
    """

    namespace: bytes
    names: tuple[str, ...]  # of the segments
    bounds: bytes  # start and end of each segment, four bytes each
    block_size: int
    lane: bytes  # one byte a token
    hashes: bytes  # eight bytes a whole span
    prefixes: tuple[int, ...]  # hash of all whole spans up to the end of each segment
    generation: int = 0

    @classmethod
    def of(
        cls,
        namespace: bytes,
        tokens: Sequence[int],
        segments: Sequence[Segment],
        block_size: int,
        generation: int = 0,
    ) -> Fingerprint:
        """Take the fingerprint of a prompt; `segments` are in the order of its tokens."""
        packed = pack(tokens)
        span = SPAN * block_size
        whole = len(tokens) // span
        spans = struct.iter_unpack(f"{4 * span}s", packed[: 4 * span * whole])
        hashes = struct.pack(f"<{whole}q", *map(hash, spans))
        ends = sorted({segment.end // span for segment in segments} - {0})
        link, prefixes = hash(namespace), []
        for first, stop in pairwise([0, *ends]):
            link = hash((link, hashes[8 * first : 8 * stop]))
            prefixes.append(link)
        names = tuple(intern(segment.name) for segment in segments)
        bounds = pack([*chain.from_iterable(segment[1:] for segment in segments)])
        lane = packed[::4]
        return cls(namespace, names, bounds, block_size, lane, hashes, tuple(prefixes), generation)

    def __len__(self) -> int:
        return len(self.lane)

    @property
    def size(self) -> int:
        """About how many bytes of memory it takes, but for what every fingerprint does."""
        per_token = len(self.lane) + len(self.hashes)
        per_segment = len(self.names) * BYTES_PER_SEGMENT
        return per_token + per_segment + len(self.prefixes) * BYTES_PER_PREFIX

    @property
    def segments(self) -> Iterator[Segment]:
        """The segments, in the order of the prompt's tokens."""
        bounds = struct.iter_unpack("<2i", self.bounds)
        return (Segment(name, *ends) for name, ends in zip(self.names, bounds, strict=True))

    def common(self, other: Fingerprint) -> tuple[int, bool]:
        """Count the tokens in which two prompts begin alike; False where it may be more.

        It may where a span is known to differ but the lanes do not show where: the count then
        ends before that span. Where a span differs in several tokens and the lanes show only
        the later ones (the low bytes of two tokens are equal once in 256), the count is too high
        by less than a span.
        """
        length = SPAN * self.block_size
        start = _common_prefix(self.hashes, other.hashes) // 8 * length
        span = slice(start, start + length)
        shared = _common_prefix(self.lane[span], other.lane[span])
        return (start, False) if shared == length else (start + shared, True)

    def resumes(self, other: Fingerprint, token: int) -> bool:
        """Whether text that follows closely on a token of `other` comes here too, behind it."""
        length = RESUMED + self.block_size
        distance = 1
        while (start := token + distance) + length <= len(other) and distance <= NEAR:
            if self.lane.find(other.lane[start : start + length], token) >= 0:
                return True
            distance *= 2
        return False

    @property
    def content_end(self) -> int:
        """Where the generation prompt begins, which no later prompt needs to repeat."""
        starts = [start for name, start, _ in self.segments if name == "generation_prompt"]
        return min(starts, default=len(self))

    @property
    def last_message(self) -> int:
        """Where the last message begins, or the text of a prompt without messages."""
        starts = [start for name, start, _ in self.segments if wire_order(name)[0] == 2]
        return max(starts, default=len(self))

    def segment(self, token: int) -> str | None:
        """Name the segment that a token belongs to."""
        names = (name for name, start, end in self.segments if start <= token < end)
        return next(names, None)


def wire_order(name: str) -> tuple[int, int]:
    """Sort segments: tools, system, messages by number, then what the template adds."""
    kind, _, number = name.partition(".")
    return WIRE_ORDER.get(kind, 3), int(number or 0)


def _common_prefix(a: bytes, b: bytes) -> int:
    """Count the equal leading bytes by bisection: the slices compare in C."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:  # most of what is compared here
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
