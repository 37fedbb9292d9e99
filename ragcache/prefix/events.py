"""What a prefix cache tells about its blocks, for those who follow it from elsewhere."""

from __future__ import annotations

from typing import Protocol


class BlockSink(Protocol):
    """Told of all that changes what can be found; called in order, by the cache's thread.

    Blocks are known by their `block_name`. After every call, whatever is stored has its parents
    stored, too. Must not wait: the engine does meanwhile.
    """

    def stored(self, name: bytes, on_host: bool) -> None:
        """A block can be found, or has moved: it is on the device or on the host now."""

    def removed(self, name: bytes) -> None:
        """A block cannot be found any more."""
