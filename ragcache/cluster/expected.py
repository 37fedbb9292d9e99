"""Blocks that replicas are about to store, since a request was just sent there."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import takewhile

from ragcache.cluster.replica import Replica

LIFETIME = 10.0  # seconds, in which the news of a prefill should come
MAX_BLOCKS = 100_000  # of a replica; some 20 MB


_Life = tuple[str, str]  # id and epoch


class Expected:
    """Names of blocks by the life of a replica, each for a short time.

    Without it, all replicas would compute the prefix of a burst: the first request's blocks are
    announced only when they are there.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._until: defaultdict[_Life, OrderedDict[bytes, float]] = defaultdict(OrderedDict)
        self._clock = clock

    def add(self, replica: Replica, chains: Iterable[Sequence[bytes]]) -> None:
        """Expect blocks at a replica from now on."""
        blocks, until = self._until[_life(replica)], self._clock() + LIFETIME
        for names in chains:
            for name in names:
                blocks[name] = until
                blocks.move_to_end(name)
        while len(blocks) > MAX_BLOCKS or (blocks and next(iter(blocks.values())) < self._clock()):
            blocks.popitem(last=False)

    def remove(self, replica: Replica, chains: Iterable[Sequence[bytes]]) -> None:
        """Expect them no more: nothing came of the request."""
        blocks = self._until[_life(replica)]
        for names in chains:
            for name in names:
                blocks.pop(name, None)

    def match(self, replica: Replica, names: Sequence[bytes]) -> int:
        """Leading blocks with these names that are expected at a replica."""
        blocks: Mapping[bytes, float] = self._until.get(_life(replica), {})
        now = self._clock()
        return sum(1 for _ in takewhile(lambda name: blocks.get(name, 0.0) > now, names))

    def keep(self, replica_ids: Container[str]) -> None:
        """Forget all other replicas."""
        for gone in [each for each in self._until if each[0] not in replica_ids]:
            del self._until[gone]


def _life(replica: Replica) -> _Life:
    return replica.id, replica.epoch
