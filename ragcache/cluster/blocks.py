"""The names of the blocks that a replica holds, and how they change.

A name is cut to its first 16 bytes: digests do not compress, and names are hints. Two blocks of
one name would cost no more than a badly chosen replica, which compares tokens again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import iter_unpack

NAME_BYTES = 16
FIELDS = ("device", "host", "removed")


@dataclass(frozen=True, slots=True)
class Changes:
    """Where blocks are by now; each field is a row of names of `NAME_BYTES` bytes.

    No name is in it twice, so the order does not matter.
    """

    device: bytes = b""
    host: bytes = b""
    removed: bytes = b""

    @classmethod
    def of(cls, places: Mapping[bytes, bool | None]) -> Changes:
        """From names to whether a block is on the host, or None where it was removed."""
        device, host, removed = (
            b"".join([name for name, place in places.items() if place is each])
            for each in (False, True, None)
        )
        return cls(device, host, removed)

    @classmethod
    def read(cls, fields: Mapping[bytes, bytes]) -> Changes:
        """From what `fields` has written; raises ValueError where a row has half a name."""
        changes = cls(*(fields.get(name.encode(), b"") for name in FIELDS))
        if any(len(row) % NAME_BYTES for row in changes._rows()):
            raise ValueError("names of blocks are cut off")
        return changes

    def fields(self) -> dict[str, bytes]:
        """For Redis, which does not repeat the names of equal fields in a stream."""
        return dict(zip(FIELDS, self._rows(), strict=True))

    def __len__(self) -> int:
        return sum(map(len, self._rows())) // NAME_BYTES

    def _rows(self) -> tuple[bytes, bytes, bytes]:
        return self.device, self.host, self.removed


class Blocks:
    """The blocks of one replica. Whoever holds a block holds its parents, too."""

    def __init__(self) -> None:
        self.on_host: dict[bytes, bool] = {}  # by name

    def apply(self, changes: Changes) -> None:
        """Take changes over."""
        self.on_host.update(dict.fromkeys(_names(changes.device), False))
        self.on_host.update(dict.fromkeys(_names(changes.host), True))
        for name in _names(changes.removed):
            self.on_host.pop(name, None)

    def match(self, names: Sequence[bytes]) -> int:
        """Leading blocks with these names, each the child of the one before. O(log n)."""
        return bisect_left(names, True, key=lambda name: name[:NAME_BYTES] not in self.on_host)

    def hosted(self, names: Sequence[bytes]) -> int:
        """Of these blocks, which are held, how many are on the host: the last ones. O(log n)."""
        first = bisect_left(names, True, key=lambda name: self.on_host.get(name[:NAME_BYTES], True))
        return len(names) - first


def _names(row: bytes) -> Iterator[bytes]:
    return (name for (name,) in iter_unpack(f"{NAME_BYTES}s", row))
