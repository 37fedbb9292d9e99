"""The prompts of the recent past, as fingerprints, bounded in number and size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from ragcache.prefix.fingerprint import Fingerprint
from ragcache.prefix.names import OWNER_BYTES
from ragcache.types import Explanation

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
    def groups(self) -> tuple[bytes, bytes]:
        """The namespace it belongs to, and the owner."""
        return self.prompt.namespace, self.prompt.namespace[:OWNER_BYTES]


class Records:
    """Records by id; those that were computed also by their prefixes, namespace and owner.

    The oldest go first, when there are more than `max_records` or their prompts have more than
    `max_tokens` in all.
    """

    def __init__(self, max_tokens: int, max_records: int) -> None:
        self._max_tokens = max_tokens
        self._max_records = max_records
        self._tokens = 0
        self._by_id: dict[str, Record] = {}
        self._by_prefix: dict[int, Record] = {}
        self._groups: dict[bytes, dict[str, Record]] = {}

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
        self._tokens += len(record.prompt)
        while self._tokens > self._max_tokens or len(self._by_id) > self._max_records:
            self._remove(next(iter(self._by_id)))

    def computed(self, record_id: str) -> Record | None:
        """Let a record be found by others than its id; None where it is gone."""
        record = self._by_id.get(record_id)
        if record is not None:
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
        """Remove all records of an owner, or of one namespace."""
        for record in list(self._by_id.values()):
            if record.prompt.namespace.startswith(owner):
                self._remove(record.id)

    def _recent(self, group: bytes) -> Iterator[Record]:
        return islice(reversed(self._groups.get(group, {}).values()), RECENT)

    def _remove(self, record_id: str) -> None:
        record = self._by_id.pop(record_id)
        self._tokens -= len(record.prompt)
        for prefix in record.prompt.prefixes:
            if self._by_prefix.get(prefix) is record:
                del self._by_prefix[prefix]
        for name in record.groups:
            group = self._groups.get(name, {})
            group.pop(record_id, None)
            if not group:
                self._groups.pop(name, None)
