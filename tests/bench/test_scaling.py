"""Scaling measures what it says, at sizes that the model allows, and tells how it grows."""

import json
from xml.etree import ElementTree

import pytest
from rich.console import Console

from ragcache import cli
from ragcache.bench.options import ScalingBench
from ragcache.bench.report import svg
from ragcache.bench.scaling import command, subject
from ragcache.bench.scaling.command import measure, render
from ragcache.bench.scaling.growth import of_decode, of_prefill
from ragcache.bench.scaling.page import page
from ragcache.bench.scaling.subject import OUTPUT, Subject
from ragcache.engine.loop import Engine
from ragcache.errors import ConfigError
from ragcache.loading import load_runner

SMALL = {"contexts": [64, 4000], "batches": [1, 3], "prompt": 250, "repeats": 1}
LONGEST = 2048 - OUTPUT  # of the tiny model


@pytest.fixture(scope="module")
def options(tiny_llama):
    return ScalingBench(model=str(tiny_llama), **SMALL)


@pytest.fixture(scope="module")
def results(options):
    return measure(options)


@pytest.fixture
def steps(monkeypatch):
    """The chunks of each step that engines take, as (start, count)."""
    seen = []
    advance = Engine._advance

    def watch(self, chunks):
        seen.append([(chunk.start, chunk.count) for chunk in chunks])
        return advance(self, chunks)

    monkeypatch.setattr(Engine, "_advance", watch)
    return seen


def test_all_sizes_are_measured_and_cut_to_what_the_model_allows(results):
    sizes = [(row["context"], row["batch"]) for row in results["decode"]]
    assert sizes == [(64, 1), (64, 3), (LONGEST, 1), (LONGEST, 3)]
    assert results["prompt"] == 240  # whole blocks
    assert [row["uncached"] for row in results["prefill"]] == [16, 48, 112, 176, 240]
    assert all(row["seconds"] > 0 for row in results["decode"] + results["prefill"])


def test_decodes_stand_behind_a_context_that_is_not_computed(tiny_llama, steps):
    small = Subject(str(tiny_llama), "auto")
    assert small.decode(3, 100) > 0
    small.close()
    first, *others = steps
    assert first == [(96, 4)] * 3  # only what fills no block
    assert others == [[(100 + i, 1)] * 3 for i in range(OUTPUT - 1)]


@pytest.mark.parametrize("uncached", [16, 160])
def test_a_prompt_has_as_many_new_tokens_as_are_asked_for(uncached, tiny_llama, steps):
    small = Subject(str(tiny_llama), "auto")
    assert small.prefill(160, uncached) > 0
    small.close()
    assert steps == [[(160 - uncached, uncached)]]


def test_what_the_pool_does_not_hold_is_left_out(options, monkeypatch):
    def load_little(settings, meet):
        return load_runner(settings.model_copy(update={"kv_cache_blocks": 30}), meet)

    monkeypatch.setattr(subject, "load_runner", load_little)
    results = measure(options)
    assert [(row["context"], row["batch"]) for row in results["decode"]] == [(64, 1), (64, 3)]
    with pytest.raises(ConfigError, match="no room"):
        measure(options.model_copy(update={"contexts": [2000]}))


def test_the_costs_of_a_plane_are_found():
    rows = [
        {"batch": batch, "context": context, "seconds": 3 + 2 * batch + 0.5 * batch * context}
        for batch in (1, 2, 8)
        for context in (10, 40)
    ]
    growth = of_decode(rows)
    assert (growth.start, growth.sequence, growth.token) == pytest.approx((3, 2, 0.5))
    assert growth.error == pytest.approx(0, abs=1e-9)


def test_what_no_line_fits_shows_in_the_error():
    rows = [{"uncached": n, "seconds": 1 + n * n} for n in (1, 10, 100)]
    growth = of_prefill(rows)
    assert growth.error > 0.3
    assert f"{growth.error:.0%}" in growth.of_prompts()


def test_the_page_is_whole_and_has_the_numbers(results, check_page):
    text = page(results)
    check_page(text)
    assert text.count("<svg") == 3
    assert f"<td>{results['decode'][0]['seconds'] * 1e3:.2f}</td>" in text
    assert f"<td>{results['prefill'][0]['seconds'] * 1e3:.1f}</td>" in text


def test_the_tables_say_what_is_missing(results):
    rows = results["decode"][:-1]
    console = Console(width=160)
    with console.capture() as shown:
        console.print(render({**results, "decode": rows, "page": "there"}))
    assert f"{rows[0]['seconds'] * 1e3:.1f}" in shown.get()
    (last,) = (line for line in shown.get().splitlines() if f"{LONGEST:,}" in line)
    assert last.split()[-2] == "-"


def test_lines_lie_at_their_places_and_may_end_early():
    series = [svg.Line("a", "ours", [1, 2, 3]), svg.Line("b", "other", [2])]
    text = svg.lines("t", ["1", "2", "4"], "axis", series, str, places=[1, 2, 4])
    root = ElementTree.fromstring(text).find("svg")
    x = [float(circle.get("cx")) for circle in root.iter("circle")]
    assert len(x) == 4
    assert x[2] - x[1] == pytest.approx(2 * (x[1] - x[0]), abs=0.2)


def test_the_command_writes_page_and_figures(results, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "measure", lambda options: results)
    output, figures = tmp_path / "page.html", tmp_path / "figures.json"
    arguments = ["--output", str(output), "--json", str(figures), "--batches", "1,2"]
    monkeypatch.setattr("sys.argv", ["ragcache", "bench", "scaling", *arguments])
    cli.main()
    assert output.read_text() == page(results)
    assert json.loads(figures.read_text())["growth"] == results["growth"]
