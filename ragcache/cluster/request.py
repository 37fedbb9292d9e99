"""What the choice of a replica depends on in a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ragcache.cluster.replica import Replica
from ragcache.prefix.names import block_names, namespace_name, owner_name

Chains = tuple[list[bytes], ...]  # of each prompt, the names of its blocks


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request as a router sees it.

    `session` is what its conversation is known by, different for every tenant. `prompts` are token
    ids; there are none where the body could not be read here. `model` None is any.
    """

    session: str | None = None
    prompts: tuple[Sequence[int], ...] = ()
    tenant: str = ""
    salt: str | None = None
    model: str | None = None
    _chains: dict[tuple[str, int], Chains] = field(default_factory=dict, init=False, repr=False)

    @property
    def tokens(self) -> int:
        """The length of the prompts."""
        return sum(map(len, self.prompts))

    def fits(self, replica: Replica) -> bool:
        """Whether a replica, as far as it says, serves the model."""
        return self.model is None or not replica.models or self.model in replica.models

    def chains(self, replica: Replica) -> Chains:
        """The names that the blocks of the prompts have at a replica, as far as they can be hit.

        At least one token of every prompt is computed. There are none where nothing is known of
        the replica but its URL.
        """
        if not replica.fingerprint:
            return ()
        kind = replica.fingerprint, replica.block_size
        if kind not in self._chains:
            owner = owner_name(replica.fingerprint, self.tenant)
            namespace = namespace_name(owner, self.salt)
            self._chains[kind] = tuple(
                block_names(namespace, prompt[:-1], replica.block_size) for prompt in self.prompts
            )
        return self._chains[kind]
