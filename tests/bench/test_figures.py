import pytest

from ragcache.bench.client import Reply
from ragcache.bench.figures import percentile, summarise, summarise_probe


def reply(ttft, last, prompt, cached, output):
    return Reply(10.0, 10 + ttft, 10 + last, "", prompt, cached, output, "length")


def probe_round(**times):
    return {name: reply(ttft, ttft, 1400, 0, 1) for name, ttft in times.items()}


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 2), (75, 3), (95, 4), (100, 4)])
def test_percentiles_are_measured_values(percent, value):
    assert percentile([3, 1, 4, 2], percent) == value


def test_the_summary_adds_tokens_and_ranks_times():
    replies = [reply(0.1, 0.5, 100, 0, 5), reply(0.3, 0.5, 100, 80, 3)]
    figures = summarise(replies, wall=2.0, ideal_tokens=90)
    assert (figures.hit_rate, figures.ideal_hit_rate) == (0.4, 0.45)
    assert (figures.ttft_p50, figures.ttft_p95) == pytest.approx((0.1, 0.3))
    assert figures.tpot_p50 == pytest.approx(0.1)
    assert (figures.output_rate, figures.total_rate) == (4.0, 104.0)


def test_answers_of_one_token_have_no_output_time():
    assert summarise([reply(0.1, 0.1, 10, 0, 1)], 1.0, None).tpot_p50 is None


def test_the_ratio_is_warm_over_uncached():
    times = {"a_cold": 1.0, "a_warm": 0.1, "b_cold": 1.0, "b_warm": 0.3}
    assert summarise_probe([probe_round(**times, off=0.8)]).ratio == pytest.approx(0.25)
    assert summarise_probe([probe_round(**times)]).ratio == pytest.approx(0.2)


def test_one_slow_round_does_not_count():
    usual = {"a_cold": 1.0, "a_warm": 0.1, "b_cold": 1.1, "b_warm": 0.2}
    rounds = [probe_round(**dict.fromkeys(usual, 9.0)), *[probe_round(**usual)] * 2]
    figures = summarise_probe(rounds)
    assert (figures.a_cold, figures.b_warm) == pytest.approx((1.0, 0.2))


@pytest.mark.parametrize(
    ("a_cold", "b_cold", "off", "proven"),
    [(1.0, 0.95, 1.0, True), (1.0, 0.12, 0.12, False), (1.0, 1.0, 0.1, False)],
    ids=["prefix hits", "a server that warmed up", "as fast without sharing"],
)
def test_hits_are_proven_by_what_stays_slow(a_cold, b_cold, off, proven):
    times = probe_round(a_cold=a_cold, a_warm=0.1, b_cold=b_cold, b_warm=0.1, off=off)
    assert summarise_probe([times]).proves_hits is proven
