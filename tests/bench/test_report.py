"""The report measures what it says, against controls that differ, and its page needs nothing."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from ragcache.bench.lengths import ALPACA, LONGEST, SHAREGPT
from ragcache.bench.options import ReportBench
from ragcache.bench.report import claims, command, figures, speed, svg
from ragcache.bench.report.command import Sizes, measure, render, run
from ragcache.bench.report.memory import Contiguous, Job, Paged, reservations
from ragcache.bench.report.packing import jobs, pack
from ragcache.bench.report.page import page

SMALL = Sizes(lifetimes=12, block_sizes=(8, 16), concurrency=(1, 4), prefixes=(0, 64), rounds=1)


@pytest.fixture(scope="module")
def results(tiny_llama):
    return measure(ReportBench(model=str(tiny_llama), requests=2, seed=3), SMALL)


def ways(rows, lengths):
    return {row["way"]: row for row in rows if row["lengths"] == lengths.name}


def job(prompt, total, name=0):
    return Job(name, list(range(prompt)), total, LONGEST)


def test_lengths_are_those_of_the_paper_and_bounded():
    drawn = [next_job.total for _, next_job in zip(range(4000), jobs(SHAREGPT, 0), strict=False)]
    assert max(drawn) <= LONGEST
    assert 440 < sum(drawn) / len(drawn) < 510  # 161 + 338, less what the limit cuts off


def test_reservations_waste_as_the_paper_says_and_blocks_do_not():
    memories = {**reservations(claims.SLOTS), "blocks": Paged(claims.SLOTS, 16)}
    found = {way: pack(memory, SHAREGPT, 20, seed=1) for way, memory in memories.items()}
    longest, power, exact, blocks = found.values()
    assert 0.6 < longest.waste < 0.8
    assert longest.waste > power.waste > exact.waste > 10 * blocks.waste
    assert blocks.waste < 0.04
    assert blocks.running > 2 * exact.running


def test_short_requests_leave_more_of_their_blocks_empty(results):
    found = ways(results["packing"], ALPACA)
    assert found["blocks"]["waste"] > ways(results["packing"], SHAREGPT)["blocks"]["waste"]
    assert found["blocks"]["running"] > 10 * found["room for the longest"]["running"]


@pytest.mark.parametrize("way", [*reservations(1), "blocks", "blocks, not shared"])
def test_every_slot_is_counted_once_in_every_step(way):
    total, lengths = 8192, replace(SHAREGPT, shared=100)
    memory = {
        **reservations(total),
        "blocks": Paged(total, 16),
        "blocks, not shared": Paged(total, 16, share=False),
    }[way]
    steps = 0

    def watch(running):
        nonlocal steps
        steps += 1
        slots = memory.slots(running)
        assert slots.total == total
        assert min(slots.tokens, slots.to_come, slots.unused, slots.free) >= 0
        every = sum(len(each.tokens) for each in running)
        assert slots.tokens < every if way == "blocks" else slots.tokens == every

    usage = pack(memory, lengths, 2, seed=1, watch=watch)
    assert steps == 2 * 338 * 3 // 4
    assert usage.tokens + usage.to_come + usage.unused + usage.free == pytest.approx(1)
    if way.startswith("blocks"):
        memory.cache.check()


def test_a_contiguous_piece_goes_to_the_first_gap_that_is_large_enough():
    memory = Contiguous(100, lambda job: job.total)
    first, second, third = job(1, 30, 1), job(1, 30, 2), job(1, 30, 3)
    assert all(map(memory.start, (first, second, third)))
    memory.end(first)
    memory.end(third)
    assert not memory.start(job(1, 50))  # 70 slots are free, in two pieces
    assert memory.start(job(1, 40))
    assert memory.start(job(1, 30))
    assert not memory.start(job(1, 1))


def test_requests_that_do_not_fit_any_more_give_way_and_end_later():
    memory = Paged(160, 16)  # ten blocks
    usage = pack(memory, replace(SHAREGPT, mean_input=20, mean_output=60), 2, seed=1, most=2)
    assert 0 < usage.running <= 2
    with pytest.raises(ValueError, match="too small for a request"):
        pack(Paged(16, 16), SHAREGPT, 1, seed=1)


def test_a_shared_system_prompt_is_there_once(results):
    alone, four = results["sharing"]
    assert alone["shared"] == alone["unshared"]
    saved = four["unshared"] - four["shared"]
    assert saved == pytest.approx(3 / 4 * claims.SHARED * claims.TOKEN_BYTES, rel=0.02)


def test_a_block_of_one_token_hits_what_an_ideal_cache_does_and_larger_ones_less():
    requests = list(claims.agents(0, sessions=6))
    rates = [claims.hit_rate(requests, size) for size in (1, 16, 128)]
    assert rates == sorted(rates, reverse=True)
    ideal = claims.ideal_hits([(tokens[:end], tokens[:-1]) for tokens, end in requests], 1)
    assert rates[0] == sum(ideal) / sum(end for _, end in requests)


def test_larger_blocks_waste_more_and_have_shorter_tables(results):
    small, large = results["block_sizes"]
    assert small["waste"] < large["waste"]
    assert small["hit_rate"] > large["hit_rate"]
    assert small["entries"] > 1.8 * large["entries"]
    assert all(row[name] > 0 for row in (small, large) for name in ("lookup_ms", "attention_ms"))


def test_the_engine_with_caching_hits_the_prefix_and_the_control_nothing(results):
    nothing, prefix = results["speed"]["points"]
    assert prefix["on"]["hit_tokens"] == 64
    assert nothing["on"]["hit_tokens"] == nothing["off"]["hit_tokens"] == 0
    assert prefix["off"]["hit_tokens"] == 0
    assert results["speed"]["same_answers"] == results["speed"]["answers"] == 4
    for point in (nothing, prefix):
        for side in ("on", "off"):
            assert point[side]["ttft"] > 0
            assert point[side]["output_rate"] > 0


def test_the_page_is_whole_and_loads_nothing(results, check_page):
    text = page(results)
    check_page(text)
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(plots) == 4 + 4 + 1 + 4 + 2  # with the four boxes of the key


def test_the_page_has_the_measured_numbers(results):
    text = page(results)
    found = ways(results["packing"], SHAREGPT)
    assert f"{found['room for the longest']['waste']:.1%} wasted" in text
    assert f"{found['blocks']['running']:.1f}" in text
    assert "4 of 4 answers" in text
    assert f"<td>{results['speed']['points'][1]['off']['ttft']:.3f}</td>" in text


def test_bars_are_as_long_as_their_values():
    rows = [svg.Bar("a & b", [svg.Part("ours", 1), svg.Part("lost", 3)], "note")]
    root = ElementTree.fromstring(svg.bars("title", rows, 4)).find("svg")
    widths = [float(rect.get("width")) for rect in root.iter("rect")]
    assert widths[1] == pytest.approx(3 * widths[0])
    assert sum(widths) == pytest.approx(svg.WIDTH - svg.LABELS - svg.NOTES)


def test_lines_rise_with_their_values_and_labels_stand_apart():
    series = [svg.Line("one", "ours", [0, 5, 10]), svg.Line("two", "control", [0, 0, 9.9])]
    text = svg.lines("title", ["1", "2", "3"], "axis", series, "{:.1f}".format)
    root = ElementTree.fromstring(text).find("svg")
    first = [float(circle.get("cy")) for circle in root.iter("circle")][:3]
    assert first[0] - first[1] == pytest.approx(first[1] - first[2], abs=0.2)
    labels = [each for each in root.iter("text") if "label" in each.get("class")]
    assert [label.text for label in labels] == ["one 10.0", "two 9.9"]
    heights = [float(label.get("y")) for label in labels]
    assert abs(heights[0] - heights[1]) >= 15.9


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.0123, "0.012"), (4.18, "4.2"), (152.1, "152"), (4e4, "40,000")]
)
def test_numbers_are_short_and_without_exponents(value, text):
    assert figures._short(value) == text


def test_the_command_writes_the_page_and_shows_the_claims(results, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "measure", lambda options: results)
    output = tmp_path / "report.html"
    shown = run(ReportBench(output=output))
    assert output.read_text() == page(results)
    console = Console(width=160)
    with console.capture() as text:
        console.print(render(shown))
    assert "ShareGPT-like: wasted" in text.get()
    assert str(output) in text.get().replace("\n", "")


def test_the_attention_of_every_block_size_reads_the_same_tokens():
    with pytest.raises(RuntimeError, match="invalid"):
        speed.attention_ms((3,), 1)  # does not divide the context
