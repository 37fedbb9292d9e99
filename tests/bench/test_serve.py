import asyncio
import io

import pytest
from pydantic import ValidationError
from rich.console import Console

from ragcache.bench import serve
from ragcache.bench.client import RequestFailed
from ragcache.bench.figures import Results
from ragcache.bench.options import ServeBench
from ragcache.bench.serve import measure
from ragcache.bench.tables import report


@pytest.fixture
def options(fake, monkeypatch):
    """Options for a small run, with the fake server's words as tokens."""
    monkeypatch.setattr(serve.ChatTokenizer, "load", lambda model: fake.tokenizer)
    small = {"sessions": 3, "turns": 2, "max_tokens": 5, "probe_tokens": 60, "probe_repeats": 2}

    def make(**changes):
        return ServeBench.model_validate({"url": fake.url, "block_size": 4, **small, **changes})

    return make


async def test_an_ideal_cache_reaches_the_ideal_hit_rate(options):
    figures = (await measure(options(concurrency=1))).run
    assert figures.requests == 6
    assert figures.output_tokens == 30
    assert figures.cached_tokens == figures.ideal_tokens > 0


async def test_each_run_starts_cold(options, fake):
    first = await measure(options(concurrency=1))
    assert (await measure(options(concurrency=1))).run.cached_tokens == first.run.cached_tokens


async def test_the_control_shares_nothing(options):
    results = await measure(options(control=True))
    assert results.control.cached_tokens == 0 < results.run.cached_tokens
    assert results.control.prompt_tokens == results.run.prompt_tokens
    assert results.same_answers == 6


async def test_the_probe_fills_its_prompt_and_reuses_all_but_the_end(options):
    probe = (await measure(options())).probe
    assert 58 <= probe.prompt_tokens <= 60
    assert probe.cold_cached_tokens == 0
    assert probe.prompt_tokens - probe.warm_cached_tokens <= 2 * 4
    assert probe.off is not None


async def test_without_salt_no_salt_is_sent(options, fake):
    results = await measure(options(salt=False))
    assert results.probe.off is None
    assert not any("cache_salt" in request for request in fake.requests)


def test_a_control_needs_salts(options):
    with pytest.raises(ValidationError, match="control needs salt"):
        options(control=True, salt=False)


async def test_another_tokenizer_leaves_the_ideal_unknown(options, fake, monkeypatch):
    class OtherTokenizer:
        def prompt_ids(self, messages):
            return [*fake.tokenizer.prompt_ids(messages), 0]

    monkeypatch.setattr(serve.ChatTokenizer, "load", lambda model: OtherTokenizer())
    results = await measure(options(probe_tokens=0))
    assert results.run.ideal_hit_rate is None
    assert "--tokenizer" in results.notes[0]


async def test_the_key_is_sent(options, fake):
    await measure(options(api_key="secret", probe_tokens=0))
    assert fake.keys == {"Bearer secret"}


async def test_the_command_prints_the_figures_and_writes_them(options, tmp_path, capsys):
    file = tmp_path / "figures.json"
    await asyncio.to_thread(options(json=str(file), control=True).cli_cmd)
    results = Results.model_validate_json(file.read_text())
    out = capsys.readouterr().out
    assert f"{results.run.hit_rate:.1%}" in out
    assert "6 of 6" in out


async def test_a_refused_request_ends_the_benchmark(options, fake):
    fake.refusal = (503, "still loading")
    with pytest.raises(RequestFailed, match="HTTP 503: still loading"):
        await measure(options())


async def test_the_report_names_what_is_unknown(options):
    results = await measure(options(concurrency=1, probe_tokens=0, max_tokens=1))
    figures = results.run.model_copy(update={"ideal_hit_rate": None})
    page = io.StringIO()
    unsure = results.model_copy(update={"run": figures, "notes": ("look here",)})
    Console(file=page, width=120).print(report(unsure))
    text = page.getvalue()
    assert "unknown" in text
    assert "look here" in text
