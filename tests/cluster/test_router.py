"""A router over a real directory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragcache.cluster.blocks import NAME_BYTES, Blocks, Changes
from ragcache.cluster.directory import Directory
from ragcache.cluster.expected import LIFETIME
from ragcache.cluster.replica import Replica
from ragcache.cluster.request import RouteRequest
from ragcache.cluster.router import OUTDATED, Router
from ragcache.cluster.trust import SURPRISES

TOKENS = tuple(range(1, 65))  # 4 blocks, of which 3 can be hit


class World:
    """Two replicas, a directory that is told about them, and a router."""

    def __init__(self) -> None:
        self.now = 0.0
        self.replicas = [
            Replica(name, "1", f"http://{name}", ("m",), "f", 16, 0, 0, False)
            for name in ("a", "b")
        ]
        self.directory = Directory(self.clock)
        self.directory.found()
        self.router = Router(self.directory, self.clock)
        for each in self.replicas:
            self.directory.renew(each, 1000)
            self.directory.restore(each, 0, Blocks())

    def clock(self) -> float:
        return self.now

    def store(self, replica: Replica, request: RouteRequest, place: bool | None = False) -> None:
        places = {name[:NAME_BYTES]: place for name in request.chains(replica)[0]}
        position = self.directory.positions()[replica] + 1
        self.directory.apply(replica, position, Changes.of(places))

    def best(self, request: RouteRequest):
        return self.router.rank(request, self.replicas)[0]


@pytest.fixture
def world() -> World:
    return World()


def ask(session="s", tokens=TOKENS, **fields):
    return RouteRequest(session, (tokens,), **fields)


def test_the_replica_that_holds_the_prompt_comes_first(world):
    world.store(world.replicas[1], ask())
    best = world.best(ask())
    assert (best.replica.id, best.hit_tokens, best.credit) == ("b", 48, 48)
    assert best.cost == 16


@pytest.mark.parametrize("other", [{"tenant": "t"}, {"salt": "x"}, {"salt": ""}])
def test_nothing_is_expected_across_tenants_and_salts(world, other):
    world.store(world.replicas[1], ask())
    assert world.best(ask(**other)).hit_tokens == 0
    world.store(world.replicas[0], ask(**other))
    assert world.best(ask(**other)).replica.id == "a"


def test_the_last_token_is_never_expected_to_be_cached(world):
    world.store(world.replicas[0], ask(tokens=(*TOKENS, 99)))
    assert world.best(ask()).hit_tokens == 48
    assert world.best(ask(tokens=(*TOKENS, 7))).hit_tokens == 64


def test_all_prompts_of_a_request_count(world):
    world.store(world.replicas[0], ask())
    best = world.best(RouteRequest("s", (TOKENS, TOKENS, (5,) * 40)))
    assert (best.hit_tokens, best.prompt_tokens) == (96, 168)


def test_blocks_in_host_memory_count_less(world):
    world.store(world.replicas[0], ask(), place=True)
    world.store(world.replicas[1], ask())
    first, second = world.router.rank(ask(), world.replicas)
    assert (first.replica.id, first.credit) == ("b", 48)
    assert (second.hit_tokens, second.credit) == (48, 36)


def test_a_replica_of_another_model_is_left_out(world):
    other = replace(world.replicas[0], models=("other",))
    ranked = world.router.rank(ask(model="m"), [other, world.replicas[1]])
    assert [option.replica.id for option in ranked] == ["b"]
    assert len(world.router.rank(ask(model="unknown"), world.replicas)) == 2
    unnamed = replace(other, models=())
    assert len(world.router.rank(ask(model="m"), [unnamed, world.replicas[1]])) == 2


def test_a_burst_goes_where_its_prefix_is_being_computed(world):
    first = world.best(ask("1"))
    world.router.sent(ask("1"), first)
    second = world.best(ask("2"))
    assert second.replica == first.replica
    assert second.hit_tokens == 48
    world.router.ended(first)
    world.now = LIFETIME + 1
    assert world.best(ask("2")).hit_tokens == 0


def test_what_gave_no_answer_is_expected_to_have_nothing(world):
    first = world.best(ask())
    world.router.sent(ask(), first)
    assert world.best(ask()).hit_tokens == 48
    world.router.ended(first)
    world.router.unanswered(ask(), first)
    assert [option.hit_tokens for option in world.router.rank(ask(), world.replicas)] == [0, 0]


def test_a_view_that_proves_wrong_weighs_less(world):
    world.store(world.replicas[0], ask())
    before = world.best(ask())
    for _ in range(30):
        world.router.learn(before, reported=0)
    after = next(o for o in world.router.rank(ask(), world.replicas) if o.replica.id == "a")
    assert after.hit_tokens == 48
    assert after.credit < 24


def test_what_was_cold_teaches_nothing(world):
    world.router.learn(world.best(ask()), reported=48)
    world.store(world.replicas[0], ask())
    assert world.best(ask()).credit == 48


def test_an_outage_is_bridged_and_then_hashed(world):
    world.store(world.replicas[1], ask())
    assert world.best(ask()).hit_tokens == 48
    world.directory.lost()
    world.now += OUTDATED / 2
    assert world.best(ask()).hit_tokens == 48
    world.now += OUTDATED
    assert world.router.is_blind()
    assert world.best(ask()).hit_tokens == 0
    world.directory.found()
    world.directory.renew(world.replicas[1], 1000)
    assert world.best(ask()).hit_tokens == 48


def test_without_a_directory_conversations_keep_their_replica():
    replicas = World().replicas
    routers = Router(), Router()
    homes = {}
    for session in map(str, range(40)):
        ranked = [router.rank(ask(session), replicas) for router in routers]
        assert ranked[0] == ranked[1]
        homes[session] = ranked[0][0].replica.id
    assert set(homes.values()) == {"a", "b"}


def test_a_prompt_that_cannot_be_read_is_routed_by_load(world):
    blind = RouteRequest("s")
    first = world.best(blind)
    world.router.sent(blind, first)
    assert world.best(RouteRequest("t")).replica != first.replica


def test_what_is_known_of_replicas_goes_with_them(world):
    first = world.best(ask())
    world.router.sent(ask(), first)
    world.router.learn(replace(first, hit_tokens=16), reported=0)
    world.router.observe([each for each in world.replicas if each != first.replica])
    assert not world.router._expected._until
    assert not world.router._trust._records
    assert not world.router._choice._last_miss


def test_a_replica_whose_hits_are_never_foretold_is_named_once(world, caplog):
    replica = world.replicas[0]

    def answers(count, **hits):
        for i in range(count):
            request = ask(tokens=(i, *TOKENS))
            (option,) = world.router.rank(request, [replica])
            world.router.learn(option, **hits)

    answers(SURPRISES - 1, reported=48)
    world.store(replica, ask())
    (option,) = world.router.rank(ask(), [replica])
    world.router.learn(option, option.hit_tokens)  # so it is foretold after all
    answers(SURPRISES - 1, reported=48)
    answers(3 * SURPRISES, reported=0)
    assert not caplog.records
    answers(3 * SURPRISES, reported=48)
    assert [record.message.split()[0] for record in caplog.records] == ["a"]


def test_what_the_router_cannot_read_surprises_nobody(world, caplog):
    for _ in range(SURPRISES):
        option = world.best(RouteRequest("s"))
        world.router.learn(option, 48)
    assert not caplog.records
