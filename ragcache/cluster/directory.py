"""Which replicas there are and which blocks each of them holds, from memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ragcache.cluster.blocks import Blocks, Changes
from ragcache.cluster.keys import LEASE
from ragcache.cluster.replica import Replica


@dataclass(slots=True, eq=False)
class View:
    """One life of a replica, as far as it is known here."""

    replica: Replica
    valid_until: float  # by the directory's own clock
    position: int | None = None  # of the last batch of changes; None: a snapshot is needed
    blocks: Blocks = field(default_factory=Blocks)


class Directory:
    """The view of a pool that a `Follower` feeds.

    Its questions are answered from memory and never wait. Without connection nothing changes, and
    no lease expires. Times are those of `clock` alone: a lease comes with the seconds that are
    left of it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.connected = False  # whether the view is being fed
        self._views: dict[str, View] = {}  # by replica id
        self._clock = clock

    def replicas(self) -> list[Replica]:
        """The replicas with a live lease, those that drain included."""
        return [view.replica for view in self._live()]

    def match(self, replica_id: str, names: Sequence[bytes]) -> int:
        """Leading blocks with these names (`block_names`) that a replica holds; 0 if unknown."""
        view = self._views.get(replica_id)
        return view.blocks.match(names) if view and self._is_live(view) else 0

    def hosted(self, replica_id: str, names: Sequence[bytes]) -> int:
        """Of these blocks, which `match` has found, how many are in the replica's host memory."""
        view = self._views.get(replica_id)
        return view.blocks.hosted(names) if view and self._is_live(view) else 0

    # What the follower tells

    def found(self) -> None:
        """The server answers again: leases may have ended because nobody could renew them."""
        if not self.connected:
            self.connected = True
            for view in self._views.values():
                view.valid_until = self._clock() + LEASE

    def lost(self) -> None:
        """The server does not answer: what is known stays as it is."""
        self.connected = False

    def renew(self, replica: Replica, seconds: float) -> None:
        """Note a lease that goes on for `seconds`; with a new epoch nothing is left of the old."""
        view = self._views.get(replica.id)
        valid_until = self._clock() + seconds
        if view is None or view.replica.epoch != replica.epoch:
            self._views[replica.id] = View(replica, valid_until)
        else:
            view.replica, view.valid_until = replica, valid_until

    def expire(self) -> None:
        """Forget the replicas whose leases have run out."""
        self._views = {view.replica.id: view for view in self._live()}

    def positions(self) -> dict[Replica, int | None]:
        """How far each replica has been followed; None where it takes a snapshot first."""
        return {view.replica: view.position for view in self._live()}

    def restore(self, replica: Replica, position: int, blocks: Blocks) -> None:
        """Begin with a snapshot, which has all changes up to `position`."""
        if view := self._view(replica):
            view.position, view.blocks = position, blocks

    def apply(self, replica: Replica, position: int, changes: Changes) -> None:
        """Take over a batch of changes; where one is missing before it, wait for a snapshot."""
        view = self._view(replica)
        if view is None or view.position is None:
            return
        if position != view.position + 1:
            view.position = None
            return
        view.blocks.apply(changes)
        view.position = position

    def _view(self, replica: Replica) -> View | None:
        view = self._views.get(replica.id)
        return view if view and view.replica.epoch == replica.epoch else None

    def _live(self) -> Iterator[View]:
        return filter(self._is_live, self._views.values())

    def _is_live(self, view: View) -> bool:
        return not self.connected or view.valid_until > self._clock()
