"""The engine over a pool that is too small for its prompts, with and without a host tier."""

import pytest

from ragcache.embedded import EmbeddedGateway
from ragcache.engine.swap_costs import SwapCosts
from ragcache.types import PoolCounts


def prompt(first: int) -> list[int]:
    """Six blocks and one token."""
    return [first, *range(24)]


def ask(engine, name, tokens, count=4):
    """The answer, which must be that of the bare model, and the hit tokens."""
    engine.submit(name, tokens, max_tokens=count)
    outcome = engine.drain()[name]
    assert outcome.tokens[0] == engine.greedy(tokens, count)
    return outcome.cached_tokens


def test_a_prompt_that_was_evicted_is_hit_again(bench):
    engine = bench(8, host_blocks=40)
    assert [ask(engine, f"cold {i}", prompt(i)) for i in range(4)] == [0] * 4
    assert [ask(engine, f"warm {i}", prompt(i)) for i in range(4)] == [24] * 4
    stats = engine.engine.stats
    # A prompt of 25 tokens and 3 of its answer: seven blocks. Eight blocks hold one and a bit.
    assert (stats.query_tokens, stats.hit_tokens) == (200, 96)
    assert stats.host.hit_tokens == 4 * 24
    assert stats.host.swapped_in == 4 * 6
    assert stats.computed_tokens == 8 * 28 - 96
    assert stats.host.evictions == 0


def test_without_the_tier_it_is_computed_again(bench):
    engine = bench(8)
    for i in range(4):
        ask(engine, f"cold {i}", prompt(i))
    assert [ask(engine, f"warm {i}", prompt(i)) for i in range(4)] == [0] * 4
    assert engine.engine.stats.host is None
    assert engine.engine.stats.computed_tokens == 8 * 28


def test_what_nothing_of_is_evicted_is_not_swapped(bench):
    engine = bench(64, host_blocks=40)
    assert ask(engine, "cold", prompt(0)) == 0
    assert ask(engine, "warm", prompt(0)) == 24
    host = engine.engine.stats.host
    assert (host.hit_tokens, host.swapped_out, host.swapped_in) == (0, 0, 0)
    assert host.pool == PoolCounts(free=40, cached=0, held=0)


def test_a_preempted_request_comes_back_by_a_swap_and_counts_once(bench):
    prompts = {str(i): prompt(i)[:13] for i in range(4)}
    engine = bench(12, host_blocks=60, max_running=4)
    for name, tokens in prompts.items():
        engine.submit(name, tokens, max_tokens=20)
    outcomes = engine.drain()
    for name, tokens in prompts.items():
        assert outcomes[name].tokens[0] == engine.greedy(tokens, 20)
    stats = engine.engine.stats
    assert stats.preemptions > 0
    assert stats.host.swapped_in > 0
    assert (stats.query_tokens, stats.hit_tokens, stats.host.hit_tokens) == (4 * 13, 0, 0)


def test_choices_branch_off_a_prompt_that_was_swapped_in(bench):
    engine = bench(12, host_blocks=40)
    for i in range(3):
        ask(engine, f"cold {i}", prompt(i))
    engine.submit("branched", prompt(0), max_tokens=6, n=3, temperature=1.0, seed=7)
    control = bench(64)
    control.submit("branched", prompt(0), max_tokens=6, n=3, temperature=1.0, seed=7)
    outcome = engine.drain()["branched"]
    assert outcome.tokens == control.drain()["branched"].tokens
    assert outcome.cached_tokens == 24


def test_an_abort_before_the_swap_ran_leaves_nothing_held(bench):
    engine = bench(8, host_blocks=40)
    for i in range(2):
        ask(engine, f"cold {i}", prompt(i))
    engine.submit("aborted", prompt(0))
    while not engine.engine._inbox.empty():
        engine.engine._inbox.get()()
    engine.scheduler.schedule()  # admitted, and its swaps are waiting for the step
    engine.engine.abort("aborted")
    assert ask(engine, "next", prompt(0)) == 24
    engine.cache.check()


@pytest.mark.parametrize("owner", [b"n", b""])
def test_a_drop_reaches_the_host(bench, owner):
    engine = bench(8, host_blocks=40)
    for i in range(3):
        ask(engine, f"cold {i}", prompt(i))
    done = engine.engine.drop(owner)
    engine.step()
    assert done.result(0) == 21
    assert ask(engine, "again", prompt(0)) == 0


LIGHTS = ["Fastnet", "Bell Rock", "Eddystone", "Skerryvore"]
OPTIONS = {"device": "cpu", "dtype": "float32", "kv_cache_blocks": 30, "max_model_len": 480}


async def ask_about(gateway, light):
    """The answer to a prompt of more than half of the pool, and whether it was found."""
    content = f"The light of {light} stands on a rock in the sea. " * 20
    body = {
        "model": gateway.serving.model_names[0],
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 6,
        "temperature": 0,
    }
    response = await gateway.complete(body)
    usage = response["usage"]
    assert 15 * 16 < usage["prompt_tokens"] < 28 * 16
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached in (0, 16, (usage["prompt_tokens"] - 1) // 16 * 16)  # 16: what all begin with
    return response["choices"][0]["message"]["content"], cached > 16


async def test_a_gateway_with_host_memory_hits_what_it_evicted(tiny_llama):
    gateway = EmbeddedGateway.load(str(tiny_llama), **OPTIONS, host_cache_memory="4MiB")
    try:
        cold = [await ask_about(gateway, light) for light in LIGHTS]
        warm = [await ask_about(gateway, light) for light in LIGHTS]
        stats = gateway.serving.stats()
    finally:
        gateway.close()
    assert [answer for answer, _ in warm] == [answer for answer, _ in cold]
    assert [hit for _, hit in cold] == [False] * 4
    assert [hit for _, hit in warm] == [True] * 4
    assert stats.host.hit_tokens > 0
    assert stats.host.pool.total == (4 << 20) // (2 * 2 * 2 * 8 * 16 * 4)


async def test_where_computing_is_cheaper_there_is_no_tier(tiny_llama, monkeypatch, caplog):
    monkeypatch.setattr("ragcache.loading.measure", lambda *_, **__: SwapCosts(0.0, 0.02, 0.01))
    gateway = EmbeddedGateway.load(str(tiny_llama), **OPTIONS, host_cache_memory="4MiB")
    try:
        for light in LIGHTS:
            await ask_about(gateway, light)
        assert not (await ask_about(gateway, LIGHTS[0]))[1]
        assert gateway.serving.stats().host is None
    finally:
        gateway.close()
    assert "no host tier, since nothing is gained by it" in caplog.text
