import json

from rich.console import Console

from ragcache.bench.gateway import render, run
from ragcache.bench.options import GatewayBench
from ragcache.bench.standin import make_stand_in


def test_requests_are_timed_and_shown():
    results = json.loads(json.dumps(run(GatewayBench(requests=2, words=20))))
    assert 0 < results["p50"] <= results["p95"]
    console = Console(width=120)
    with console.capture() as shown:
        console.print(render(results))
    words = " ".join(shown.get().split())  # the title takes the lines that it needs
    assert f"{results['prompt_tokens']} prompt tokens" in words


def test_the_clock_stops_while_the_stand_in_computes():
    stand_in = make_stand_in()
    try:
        before = stand_in.clock()
        stand_in.runner.seconds += 1000
        assert stand_in.clock() < before - 900
    finally:
        stand_in.serving.close()
