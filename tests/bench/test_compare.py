import asyncio
import io
import json
from contextlib import AsyncExitStack

import pytest
from pydantic import ValidationError
from rich.console import Console

from ragcache import cli
from ragcache.bench.client import RequestFailed
from ragcache.bench.compare import measure, new_text, turns
from ragcache.bench.comparison import Comparison, Played, standings
from ragcache.bench.figures import RunFigures
from ragcache.bench.options import CompareBench
from ragcache.bench.settings import apart
from ragcache.bench.tables import contest
from ragcache.bench.workload import WorkloadShape
from ragcache.gateway.app import create_app, listening
from ragcache.loading import load_serving

SMALL = {"sessions": 2, "turns": 2, "max_tokens": 3, "seed": 7}


@pytest.fixture
def options(fake, other_fake):
    """Options for a small comparison of the two fake servers."""

    def make(**changes):
        peers = {"url": fake.url, "peer": {"other": other_fake.url}}
        return CompareBench.model_validate({**peers, **SMALL, **changes})

    return make


def shown(results):
    page = io.StringIO()
    Console(file=page, width=160).print(contest(results))
    return page.getvalue()


def sent(server):
    """The system prompts of a server's requests, each once, after the one that warms it up."""
    prompts = [request["messages"][0]["content"] for request in server.requests]
    return list(dict.fromkeys(prompts))[1:]


async def test_all_play_the_same_rounds_with_the_same_work(options, fake, other_fake):
    results = await measure(options(concurrency=[1, 2], rounds=3))
    played = [(each.server, each.concurrency, each.round) for each in results.played]
    assert sorted(played) == sorted(
        (server, concurrency, index)
        for server in ("ragcache", "other")
        for concurrency in (1, 2)
        for index in range(3)
    )
    assert {each.figures.requests for each in results.played} == {4}
    assert {each.figures.output_tokens for each in results.played} == {12}
    assert (fake.most_running, other_fake.most_running) == (2, 2)
    assert results.failures == []


async def test_every_turn_has_new_text_that_is_the_same_for_all(options, fake, other_fake):
    await measure(options(concurrency=[1, 2], rounds=2))
    prompts = sent(fake)
    assert len(prompts) == 4
    assert sorted(prompts) == sorted(sent(other_fake))
    assert len({prompt[:20] for prompt in prompts}) == 4


def test_text_differs_from_its_first_words_on():
    shape = WorkloadShape(sessions=1, turns=1)
    assert new_text(shape, 3) == new_text(shape, 3)
    assert new_text(shape, 3).system.startswith("Archive number 3.")


def test_whoever_comes_first_changes_from_round_to_round(options):
    order = [turn.server for turn in turns(options(concurrency=[4], rounds=4))]
    assert order == ["ragcache", "other", "other", "ragcache"] * 2


async def test_what_is_extra_goes_into_every_body(options, fake, other_fake):
    await measure(options(concurrency=[1], rounds=1, extra='{"ignore_eos": true}'))
    bodies = fake.requests + other_fake.requests
    assert all(body["ignore_eos"] is True for body in bodies)
    assert not any("cache_salt" in body for body in bodies)


async def test_a_peer_that_fails_is_told_and_the_others_go_on(options, fake, other_fake):
    gone = "http://127.0.0.1:9/v1"
    peers = {"other": other_fake.url, "gone": gone}
    other_fake.stream = ["[DONE]"]  # breaks off
    results = await measure(options(peer=peers, rounds=1, concurrency=[1]))
    assert [each.server for each in results.failures] == ["other", "gone"]
    assert "finish reason" in results.failures[0].error
    assert [each.server for each in results.standings] == ["ragcache"]
    assert "Note: gone failed" in shown(results)


async def test_a_peer_that_refuses_what_is_extra_plays_without_it(options, other_fake):
    answer = other_fake.answer

    def refuse_extra(body):
        return iter([{"error": "ignore_eos?"}]) if "ignore_eos" in body else answer(body)

    other_fake.answer = refuse_extra
    results = await measure(options(rounds=1, concurrency=[1], extra='{"ignore_eos": true}'))
    assert [each.server for each in results.standings] == ["ragcache", "other"]
    (told,) = results.failures
    assert "other failed in the request with --extra" in shown(results)
    assert "ignore_eos?" in told.error


async def test_a_peer_that_fails_later_keeps_the_rounds_that_it_played(options, other_fake):
    peer_options = options(rounds=2, concurrency=[1])
    answer = other_fake.answer

    def break_in_the_second_round(body):
        seed = int(body["messages"][0]["content"].split(".")[0].split()[-1])
        return answer(body) if seed <= peer_options.seed else iter(["[DONE]"])

    other_fake.answer = break_in_the_second_round
    results = await measure(peer_options)
    assert [each.rounds for each in results.standings] == [2, 1]
    assert [each.turn for each in results.failures] == ["round 2, 1 at once: other"]


async def test_without_ragcache_there_is_nothing_to_compare(options, fake):
    fake.refusal = (503, "still loading")
    with pytest.raises(RequestFailed, match=r"ragcache: .*still loading"):
        await measure(options())


def played(server, wall, index=0, tokens=10):
    figures = RunFigures(
        requests=1,
        wall=wall,
        prompt_tokens=100,
        cached_tokens=0,
        ideal_tokens=None,
        output_tokens=tokens,
        hit_rate=0.0,
        ideal_hit_rate=None,
        ttft_p50=wall / 2,
        ttft_p95=wall / 2,
        tpot_p50=None,
        output_rate=tokens / wall,
        total_rate=tokens / wall,
    )
    return Played(server=server, round=index, concurrency=4, figures=figures)


def test_ratios_are_those_of_one_round_and_the_median_is_theirs():
    ours = [played("ragcache", wall, index) for index, wall in enumerate((1.0, 2.0, 10.0))]
    theirs = [played("x", wall, index) for index, wall in enumerate((3.0, 4.0, 15.0))]
    first, second = standings([*ours, *theirs])
    assert (first.ratio, first.least, first.most) == (1, 1, 1)
    assert (second.ratio, second.least, second.most) == (2, 1.5, 3)
    assert second.wall == 4


@pytest.mark.parametrize(("tokens", "noted"), [(10, False), (5, True), (20, True)])
def test_other_work_than_ragcache_did_is_noted(tokens, noted):
    found = [played("ragcache", 1.0), played("x", 1.0, tokens=tokens)]
    results = Comparison(
        models={}, options={}, standings=list(standings(found)), failures=[], played=found
    )
    page = " ".join(shown(results).split())
    assert (f"x gave {tokens} output tokens" in page) == noted
    assert "none told" in page


def test_a_peer_cannot_have_our_name(options):
    with pytest.raises(ValidationError, match="another name"):
        options(peer={"ragcache": "http://127.0.0.1:1/v1"})


def test_a_peer_is_needed(options):
    with pytest.raises(ValidationError, match="peer"):
        options(peer={})


async def test_the_command_reads_its_options_and_writes_the_figures(
    fake, other_fake, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "figures.json"
    arguments = f"--url {fake.url} --peer other={other_fake.url} --concurrency 1,2 --rounds 1"
    small = "--sessions 2 --turns 1 --max-tokens 3"
    extra = ["--extra", '{"ignore_eos": true}', "--json", str(file)]
    command = ["ragcache", "bench", "compare", *arguments.split(), *small.split(), *extra]
    monkeypatch.setattr("sys.argv", command)
    await asyncio.to_thread(cli.main)
    results = json.loads(file.read_text())
    assert [each["concurrency"] for each in results["standings"]] == [1, 1, 2, 2]
    assert results["options"]["extra"] == {"ignore_eos": True}
    out = capsys.readouterr().out
    assert all(f"{each['ratio']:.2f}" in out for each in results["standings"])


async def test_two_gateways_with_a_model_are_compared(tiny_llama):
    settings = apart(model=str(tiny_llama), kv_cache_blocks=500)
    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(2):
            serving = await asyncio.to_thread(load_serving, settings)
            stack.callback(serving.close)
            loading = asyncio.get_running_loop().create_future()
            loading.set_result(serving)
            url = await stack.enter_async_context(listening(create_app(loading), "127.0.0.1", 0))
            urls.append(f"{url}/v1")
        few = {**SMALL, "rounds": 1, "concurrency": [2], "extra": '{"ignore_eos": true}'}
        options = {"url": urls[0], "peer": {"twin": urls[1]}, **few}
        results = await measure(CompareBench.model_validate(options))
    ours, twin = (each.figures for each in results.played)
    assert ours.output_tokens == twin.output_tokens == 12
    assert ours.cached_tokens > 0
    assert results.models.keys() == {"ragcache", "twin"}
