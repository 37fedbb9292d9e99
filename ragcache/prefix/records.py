"""The prompts of the recent past, as fingerprints, bounded in number and size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from ragcache.prefix.fingerprint import Fingerprint
from ragcache.prefix.names import OWNER_BYTES
from ragcache.types import Explanation

BYTES_PER_RECORD = 2048  # beside its prompt: what it notes, and its entries in the indexes
MOST_KEPT = 8  # retentions noted for a prompt, the latest
MOST_FORGOTTEN = 1024  # owners told apart; more at once are taken as all
RECENT = 16  # prompts of a namespace, or of an owner, that a new one is compared with


@dataclass(slots=True, eq=False)
class Kept:
    """A retention as it was asked for; prompts that hit it share it."""

    tokens: int
    ttl: float
    until: float


@dataclass(slots=True, eq=False)
class Record:
    """One prompt, and what became of it."""

    id: str
    prompt: Fingerprint
    explanation: Explanation
    cached: int = 0  # tokens of it that later prompts could find, once its KV was written
    kept: list[Kept] = field(default_factory=list)

    @property
    def owner(self) -> bytes:
        """Whose prompt it is."""
        return self.prompt.namespace[:OWNER_BYTES]

    @property
    def groups(self) -> tuple[bytes, bytes]:
        """The namespace it belongs to, and the owner."""
        return self.prompt.namespace, self.owner


@dataclass(slots=True, eq=False)
class Shelf:
    """The records of one owner, the oldest first."""

    records: dict[str, Record] = field(default_factory=dict)
    size: int = 0


class Records:
    """Records by id; those that were computed also by their prefixes, namespace and owner.

    Where they get too many, the owner whose records are largest in all loses its oldest, so that
    nobody is left with less than an equal share. A record counts for the bytes that it takes, and
    for `max_bytes / max_records` at least. `generation` counts the calls of `forget`.
    """

    def __init__(self, max_bytes: int, max_records: int) -> None:
        self.generation = 0
        self._least = max_bytes // max_records
        self._max_size = self._least * max_records
        self._size = 0
        self._by_id: dict[str, Record] = {}
        self._by_prefix: dict[int, Record] = {}
        self._groups: dict[bytes, dict[str, Record]] = {}
        self._shelves: dict[bytes, Shelf] = {}  # by owner
        self._forgotten: dict[bytes, int] = {}  # -> generation since then

    def get(self, record_id: str, owner: bytes) -> Record | None:
        """Look up a record of this owner."""
        record = self._by_id.get(record_id)
        found = record is not None and record.prompt.namespace.startswith(owner)
        return record if found else None

    def add(self, record: Record) -> None:
        """Keep a record, in place of an older one with its id."""
        if record.id in self._by_id:
            self._remove(record.id)
        self._by_id[record.id] = record
        shelf = self._shelves.setdefault(record.owner, Shelf())
        shelf.records[record.id] = record
        self._resize(shelf, self._cost(record))
        while self._size > self._max_size:
            largest = max(self._shelves.values(), key=attrgetter("size"))
            self._remove(next(iter(largest.records)))

    def computed(self, record_id: str) -> Record | None:
        """Let a record be found by others than its id; None where it is gone, or must not be."""
        record = self._by_id.get(record_id)
        if record is None or self._is_forgotten(record.prompt):
            return None
        self._by_prefix |= dict.fromkeys(record.prompt.prefixes, record)
        for group in record.groups:
            self._groups.setdefault(group, {})[record_id] = record
        return record

    def candidates(self, prompt: Fingerprint) -> Iterator[Record]:
        """Records of its namespace that may begin like a prompt, the latest first."""
        yield from self._recent(prompt.namespace)
        found = (self._by_prefix.get(prefix) for prefix in reversed(prompt.prefixes))
        yield from islice(filter(None, found), 1)

    def elsewhere(self, prompt: Fingerprint) -> Iterable[Record]:
        """Recent records of its owner that belong to other namespaces."""
        recent = self._recent(prompt.namespace[:OWNER_BYTES])
        return (record for record in recent if record.prompt.namespace != prompt.namespace)

    def forget(self, owner: bytes) -> None:
        """Remove all records of an owner, or of one namespace, those under way included."""
        self.generation += 1
        if len(self._forgotten) == MOST_FORGOTTEN:
            self._forgotten = {b"": self.generation}
        self._forgotten[owner] = self.generation
        for record in list(self._by_id.values()):
            if record.prompt.namespace.startswith(owner):
                self._remove(record.id)

    def _recent(self, group: bytes) -> Iterator[Record]:
        return islice(reversed(self._groups.get(group, {}).values()), RECENT)

    def _is_forgotten(self, prompt: Fingerprint) -> bool:
        """Whether a prompt was read before its records were removed."""
        names = b"", prompt.namespace[:OWNER_BYTES], prompt.namespace
        return any(self._forgotten.get(name, 0) > prompt.generation for name in names)

    def _cost(self, record: Record) -> int:
        return max(record.prompt.size + BYTES_PER_RECORD, self._least)

    def _resize(self, shelf: Shelf, size: int) -> None:
        shelf.size += size
        self._size += size

    def _remove(self, record_id: str) -> None:
        record = self._by_id.pop(record_id)
        shelf = self._shelves[record.owner]
        del shelf.records[record_id]
        self._resize(shelf, -self._cost(record))
        if not shelf.records:
            del self._shelves[record.owner]
        for prefix in record.prompt.prefixes:
            if self._by_prefix.get(prefix) is record:
                del self._by_prefix[prefix]
        for name in record.groups:
            group = self._groups.get(name, {})
            group.pop(record_id, None)
            if not group:
                self._groups.pop(name, None)
