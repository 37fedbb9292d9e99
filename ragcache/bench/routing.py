"""Routed replicas against one node with the memory of all of them, in simulated time.

Prefix caches, directories and routers are those of the product; only the model, the network and
the clock are simulated.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import mean
from typing import Any

from rich.table import Table

from ragcache.bench.figures import percentile
from ragcache.bench.options import RoutingBench
from ragcache.bench.simulation import FINGERPRINT, Agenda, Job, Node
from ragcache.bench.traces import BLOCK, TraceRequest, generate, read_trace
from ragcache.cluster.blocks import Blocks, Changes
from ragcache.cluster.choice import Option
from ragcache.cluster.directory import Directory
from ragcache.cluster.replica import Replica
from ragcache.cluster.request import RouteRequest
from ragcache.cluster.router import Router

HEARTBEAT = 5.0  # seconds between two leases of a replica
LEASE = 15.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated: a cache's size is in blocks of the trace, the lag in seconds.

    Routers that are not informed go by the hash of the conversation.
    """

    replicas: int
    blocks: int
    gateways: int
    lag: float = 0.0
    informed: bool = True


class Fleet:
    """Replicas behind routers, each of which gets any request with the same chance."""

    def __init__(self, agenda: Agenda, setup: Setup, seed: int) -> None:
        self.nodes = [
            Node(agenda, setup.blocks, partial(self._publish, i)) for i in range(setup.replicas)
        ]
        self.hit_tokens = 0
        self._agenda, self._setup = agenda, setup
        self._positions = [0] * setup.replicas  # of the last batch of changes
        self._rng = random.Random(seed)
        self._directories = [Directory(agenda.clock) for _ in range(setup.gateways)]
        self._routers = [
            Router(directory if setup.informed else None, agenda.clock)
            for directory in self._directories
        ]
        self._join()

    def play(self, requests: Sequence[TraceRequest]) -> None:
        """Serve all requests."""
        for i, request in enumerate(requests):
            self._agenda.at(request.at, partial(self._arrive, i, request))
        for beat in range(int(requests[-1].at / HEARTBEAT)):
            self._agenda.at(beat * HEARTBEAT, self._renew)
        self._agenda.run()

    def _join(self) -> None:
        self._renew()
        for directory in self._directories:
            directory.found()
            for replica in directory.replicas():
                directory.restore(replica, 0, Blocks())

    def _arrive(self, number: int, trace: TraceRequest) -> None:
        router = self._rng.choice(self._routers)
        request = RouteRequest(session=str(trace.blocks[:2]), prompts=(trace.blocks,))
        best = router.rank(request, self._replicas())[0]
        router.sent(request, best)
        done = partial(self._answered, router, best)
        self.nodes[int(best.replica.id)].submit(Job(number, trace, self._agenda.now, done))

    def _answered(self, router: Router, option: Option, hit_tokens: int) -> None:
        router.ended(option)
        router.learn(option, hit_tokens // BLOCK)
        self.hit_tokens += hit_tokens

    def _publish(self, node: int, changes: Changes) -> None:
        self._positions[node] += 1
        deliver = partial(self._deliver, node, self._positions[node], changes)
        self._agenda.at(self._agenda.now + self._setup.lag, deliver)

    def _deliver(self, node: int, position: int, changes: Changes) -> None:
        replica = self._replica(node)
        for directory in self._directories:
            directory.apply(replica, position, changes)

    def _renew(self) -> None:
        replicas = self._replicas()
        for directory, router in zip(self._directories, self._routers, strict=True):
            router.observe(replicas)
            for replica in replicas:
                directory.renew(replica, LEASE)

    def _replicas(self) -> list[Replica]:
        return [self._replica(i) for i in range(len(self.nodes))]

    def _replica(self, i: int) -> Replica:
        node = self.nodes[i]
        return Replica(
            id=str(i),
            epoch="",
            url="",
            models=(),
            fingerprint=FINGERPRINT,
            block_size=1,
            running=node.running,
            waiting=len(node.waiting),
            draining=False,
        )


def run(options: RoutingBench) -> dict[str, Any]:
    """Simulate every number of routers with every lag, and without any knowledge."""
    requests = (
        generate(options.rate, options.seconds, options.seed)
        if options.trace is None
        else read_trace(options.trace, options.seed)
    )
    setups = [
        *(
            Setup(options.replicas, options.blocks, gateways, lag)
            for gateways in options.gateways
            for lag in options.lags
        ),
        Setup(options.replicas, options.blocks, max(options.gateways), informed=False),
    ]
    return {
        "requests": len(requests),
        "prompt_tokens": sum(request.input_tokens for request in requests),
        "one_node": one_node(requests, options.replicas, options.blocks),
        "runs": [asdict(setup) | routed(requests, setup, options.seed) for setup in setups],
    }


def one_node(requests: Sequence[TraceRequest], replicas: int, blocks: int) -> dict[str, Any]:
    """The figures of one node that is as large and as strong as all replicas together."""
    agenda = Agenda()
    hits: list[int] = []
    node = Node(agenda, replicas * blocks, lambda _: None, strength=replicas)
    for i, request in enumerate(requests):
        agenda.at(request.at, partial(node.submit, Job(i, request, request.at, hits.append)))
    agenda.run()
    return _figures(requests, sum(hits), [node])


def routed(requests: Sequence[TraceRequest], setup: Setup, seed: int = 0) -> dict[str, Any]:
    """The figures of replicas behind routers."""
    fleet = Fleet(Agenda(), setup, seed)
    fleet.play(requests)
    return _figures(requests, fleet.hit_tokens, fleet.nodes)


def _figures(
    requests: Sequence[TraceRequest], hit_tokens: int, nodes: Sequence[Node]
) -> dict[str, Any]:
    ttft = [each for node in nodes for each in node.ttft]
    computed = [node.computed_tokens for node in nodes]
    return {
        "hit_rate": hit_tokens / sum(request.input_tokens for request in requests),
        "ttft_mean": mean(ttft),
        "ttft_p90": percentile(ttft, 90),
        "imbalance": max(computed) / mean(computed),
    }


def render(results: dict[str, Any]) -> Table:
    """A row for each run, and one for the single node."""
    table = Table(
        title=f"{results['requests']:,} requests, {results['prompt_tokens']:,} prompt tokens",
        caption="imbalance: most tokens computed by a replica / mean",
    )
    table.add_column("")
    for name in ("hit rate", "mean TTFT", "p90 TTFT", "imbalance"):
        table.add_column(name, justify="right")
    table.add_row("one node with the memory of all", *_cells(results["one_node"]))
    for each in results["runs"]:
        knowledge = f"lag {each['lag']:g} s" if each["informed"] else "by hash"
        table.add_row(f"{each['gateways']} routers, {knowledge}", *_cells(each))
    return table


def _cells(figures: dict[str, Any]) -> list[str]:
    return [
        f"{figures['hit_rate']:.3f}",
        f"{figures['ttft_mean']:.2f} s",
        f"{figures['ttft_p90']:.2f} s",
        f"{figures['imbalance']:.2f}",
    ]
