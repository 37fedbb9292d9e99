"""What the engine tells about its blocks, until others have been told."""

from __future__ import annotations

import time
from threading import Lock

from ragcache.cluster.blocks import NAME_BYTES, Changes

MOST_CHANGES = 1 << 16  # 1 MiB of names


class Outbox:
    """A `BlockSink` that knows which blocks there are, and which have changed since `take`.

    Of these never more than `most_changes`: beyond, they are dropped, and a snapshot is due.
    """

    def __init__(self, most_changes: int = MOST_CHANGES) -> None:
        self.dropped = 0  # changes
        self._on_host: dict[bytes, bool] = {}
        self._changes: dict[bytes, bool | None] = {}  # where a block is now, None: nowhere
        self._overflowed = False
        self._since = 0.0  # when the first of the changes came
        self._most_changes = most_changes
        self._lock = Lock()  # the engine's thread writes, the event loop's reads

    def stored(self, name: bytes, on_host: bool) -> None:
        """See `BlockSink`."""
        name = name[:NAME_BYTES]
        with self._lock:
            self._on_host[name] = on_host
            self._change(name, on_host)

    def removed(self, name: bytes) -> None:
        """See `BlockSink`."""
        name = name[:NAME_BYTES]
        with self._lock:
            self._on_host.pop(name, None)
            self._change(name, None)

    def take(self) -> Changes | None:
        """What has changed since the last call; None where some of it was dropped."""
        with self._lock:
            changes, self._changes = self._changes, {}
            overflowed, self._overflowed = self._overflowed, False
            if overflowed:
                self.dropped += len(changes)
        return None if overflowed else Changes.of(changes)

    def blocks(self) -> dict[bytes, bool]:
        """All blocks, by name, and whether they are on the host; has what is still to be taken."""
        with self._lock:
            return self._on_host.copy()

    def lag(self) -> float:
        """Seconds for which the oldest change has been waiting."""
        waiting = self._changes or self._overflowed
        return time.monotonic() - self._since if waiting else 0.0

    def _change(self, name: bytes, on_host: bool | None) -> None:
        if not self._changes and not self._overflowed:
            self._since = time.monotonic()
        self._changes[name] = on_host
        if len(self._changes) > self._most_changes:
            self.dropped += len(self._changes)
            self._changes = {}
            self._overflowed = True
