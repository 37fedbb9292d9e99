import json
import sys

import pytest
from rich.console import Console

from ragcache.bench.langchain import render, run
from ragcache.bench.options import LangchainBench
from ragcache.errors import ConfigError

THROUGH = ["in process", "HTTP"]


@pytest.fixture(scope="module")
def results():
    return json.loads(json.dumps(run(LangchainBench(calls=2, words=60, tokens=4))))


def test_every_way_is_timed_in_turn_with_the_engine(results):
    timed = [(row["call"], row["through"]) for row in results["rows"]]
    assert timed == [(call, through) for call in ("invoke", "astream") for through in THROUGH]
    assert all(0 < row["p50"] <= row["p95"] for row in results["rows"])
    assert all(row["added"] == row["p50"] - row["engine"] for row in results["rows"])


def test_all_ways_do_the_same_work(results):
    lengths = {row["prompt_tokens"] for row in results["rows"]}
    assert len(lengths) == 1
    assert min(lengths) > 60
    assert [row["output_tokens"] for row in results["rows"]] == [1, 1, 4, 4]


def test_the_table_has_a_row_for_each(results):
    console = Console(width=120)
    with console.capture() as shown:
        console.print(render(results))
    for through in THROUGH:
        assert shown.get().count(through) == 2


def test_a_missing_chat_model_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "langchain_ragcache", None)
    monkeypatch.delitem(sys.modules, "ragcache.bench.langchain")
    with pytest.raises(ConfigError, match="pip install langchain-ragcache"):
        LangchainBench().cli_cmd()
