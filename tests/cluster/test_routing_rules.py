"""The parts by which a router decides, each on its own."""

from __future__ import annotations

import pytest

from ragcache.cluster.choice import SLACK, Choice, Option
from ragcache.cluster.expected import LIFETIME, Expected
from ragcache.cluster.load import SMOOTHING, Load
from ragcache.cluster.replica import Replica
from ragcache.cluster.ring import Ring
from ragcache.cluster.trust import FORGIVING, Trust

IDS = [f"replica-{i}" for i in range(8)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def replica(name="a", running=0, waiting=0, epoch="1"):
    return Replica(name, epoch, f"http://{name}", ("m",), "f", 16, running, waiting, False)


def option(name, tokens=1000, hit=0, in_flight=0.0):
    return Option(replica(name), tokens, hit, float(hit), in_flight)


def best(choice, session, *options):
    return choice.rank(options, session)[0].replica.id


class TestChoice:
    def test_new_tokens_weigh_as_much_as_the_batch(self):
        warm, cold = option("warm", hit=800, in_flight=3), option("cold")
        assert best(Choice(), "s", cold, warm) == "warm"  # 200 × 4 < 1000 × 1
        busier = option("warm", hit=800, in_flight=5)
        assert best(Choice(), "s", cold, busier) == "cold"

    def test_cold_prompts_go_round(self):
        choice, given = Choice(), []
        for i in range(6):
            options = [option(name) for name in "abc"]
            first = choice.rank(options, str(i))[0]
            choice.chosen(first, str(i))
            given.append(first.replica.id)
        assert sorted(given[:3]) == sorted(given[3:]) == ["a", "b", "c"]

    def test_a_conversation_stays_until_that_costs_too_much(self):
        choice = Choice()
        choice.chosen(option("home"), "s")
        assert best(choice, "s", option("other"), option("home", in_flight=1)) == "home"
        assert best(choice, "t", option("other"), option("home", in_flight=1)) == "other"
        assert best(choice, "s", option("other"), option("home", in_flight=2)) == "other"

    def test_a_prefix_that_all_want_spreads(self):
        def ranked(in_flight):
            hot = option("hot", hit=999, in_flight=in_flight)
            return best(Choice(), "s", hot, option("cold"))

        assert ranked(SLACK) == "hot"
        assert ranked(100) == "cold"

    def test_where_all_are_busy_the_cheapest_is_first(self):
        options = [option("a", hit=900, in_flight=100), option("b", in_flight=100)]
        assert best(Choice(), "s", *options) == "a"

    def test_it_forgets_the_oldest_conversations(self, monkeypatch):
        monkeypatch.setattr("ragcache.cluster.choice.SESSIONS", 2)
        choice = Choice()
        for session in ("s", "t", "u"):
            choice.chosen(option("b"), session)
        options = [option("a"), option("b", in_flight=0.5)]
        assert [best(choice, session, *options) for session in "stu"] == ["a", "b", "b"]


class TestLoad:
    def test_own_requests_count_at_once(self, clock):
        load = Load(clock)
        load.sent("a")
        load.sent("a")
        assert load.in_flight("a") == 2
        load.ended("a")
        load.ended("a")
        assert load.in_flight("a") == 0
        assert not load.own  # nothing is kept of replicas that are gone

    def test_own_requests_in_a_report_do_not_count_twice(self, clock):
        load = Load(clock)
        for _ in range(4):
            load.sent("a")
        load.observe([replica(running=3, waiting=1)])
        assert load.in_flight("a") == 4

    def test_those_of_others_are_smoothed(self, clock):
        load = Load(clock)
        load.observe([replica()])
        clock.now = 5
        load.observe([replica(running=10)])
        assert 0 < load.in_flight("a") < 3
        for _ in range(20):
            clock.now += SMOOTHING / 4
            load.observe([replica(running=10)])
        assert load.in_flight("a") == pytest.approx(10, abs=0.2)

    def test_replicas_that_are_gone_are_forgotten(self, clock):
        load = Load(clock)
        load.observe([replica(running=10)])
        load.observe([])
        assert load.in_flight("a") == 0


class TestRing:
    def test_it_is_the_same_in_every_process(self):
        assert Ring("abc").order("s") == Ring("cba").order("s")
        assert Ring(IDS).order("a conversation")[:3] == ["replica-5", "replica-0", "replica-4"]

    def test_keys_are_shared_out_evenly(self):
        ring = Ring(IDS)
        first = [ring.order(str(i))[0] for i in range(4000)]
        assert all(300 < first.count(each) < 750 for each in IDS)

    def test_only_keys_of_a_lost_replica_move(self):
        before, after = Ring(IDS), Ring(IDS[1:])
        for key in map(str, range(500)):
            order = before.order(key)
            assert after.order(key) == [each for each in order if each != IDS[0]]

    def test_a_replica_at_its_bound_comes_last(self):
        ring = Ring(IDS)
        home, following = ring.order("s")[:2]
        assert ring.bounded("s", {})[0] == home
        assert ring.bounded("s", {home: 1})[0] == following
        everywhere = dict.fromkeys(IDS, 1)
        assert ring.bounded("s", everywhere)[0] == home
        assert ring.bounded("s", everywhere | {home: 4})[-1] == home


class TestTrust:
    def test_it_follows_the_answers(self, clock):
        trust = Trust(clock)
        assert trust.of(replica()) == 1
        for _ in range(100):
            trust.learn(replica(), predicted=100, reported=50)
        assert trust.of(replica()) == pytest.approx(0.5, abs=0.01)

    def test_more_hits_than_predicted_do_not_count(self, clock):
        trust = Trust(clock)
        trust.learn(replica(), predicted=16, reported=1600)
        assert trust.of(replica()) == 1

    def test_it_comes_back(self, clock):
        trust = Trust(clock)
        for _ in range(100):
            trust.learn(replica(), predicted=100, reported=0)
        clock.now = 10 * FORGIVING
        assert trust.of(replica()) > 0.99

    def test_a_restart_begins_anew(self, clock):
        trust = Trust(clock)
        trust.learn(replica(), predicted=100, reported=0)
        assert trust.of(replica()) < trust.of(replica(epoch="2")) == 1


class TestExpected:
    def test_blocks_are_expected_for_a_while(self, clock):
        expected = Expected(clock)
        expected.add(replica("a"), [[b"1", b"2"]])
        assert expected.match(replica("a"), [b"1", b"2", b"3"]) == 2
        assert expected.match(replica("b"), [b"1"]) == 0
        assert expected.match(replica("a"), [b"3", b"1"]) == 0
        clock.now = LIFETIME
        assert expected.match(replica("a"), [b"1"]) == 0

    def test_another_life_is_expected_to_have_nothing(self, clock):
        expected = Expected(clock)
        expected.add(replica(epoch="1"), [[b"1"]])
        assert expected.match(replica(epoch="2"), [b"1"]) == 0

    def test_memory_is_bounded(self, clock, monkeypatch):
        monkeypatch.setattr("ragcache.cluster.expected.MAX_BLOCKS", 3)
        expected = Expected(clock)
        expected.add(replica("a"), [[b"1", b"2"], [b"3", b"4"]])
        assert expected.match(replica("a"), [b"1"]) == 0
        assert expected.match(replica("a"), [b"3", b"4"]) == 2
        clock.now = LIFETIME + 1
        expected.add(replica("a"), [[b"5"]])
        assert len(expected._until["a", "1"]) == 1
