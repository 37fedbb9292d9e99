"""Decode steps that are recorded once and replayed: what is replayed here is the recorded call."""

from contextlib import contextmanager

import pytest
import torch

from ragcache.engine import graphs
from ragcache.engine.profile import largest_step

PROMPTS = {
    "a": [5, 17, 40, 8, 8, 61, 33, 90, 12],
    "b": [5, 17, 40, 8, 8, 61, 33, 90, 44, 3],
    "c": [7, 7, 1],
}


class Recorder:
    """Does the recorded work anew."""

    def __init__(self):
        self.recorded = 0
        self.replays = 0

    def __call__(self, work):
        self.recorded += 1

        def replay():
            self.replays += 1
            work()

        return replay


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_replayed_steps_agree_with_the_plain_model(make_pair, name):
    pair, recorder = make_pair(name), Recorder()
    engine = pair.engine(backend="triton", max_running=3, record=recorder)
    expected = {key: pair.greedy(prompt, 5) for key, prompt in PROMPTS.items()}
    assert pair.run(engine, PROMPTS, 5) == expected
    assert recorder.recorded == 3  # 1, 2 and 4 sequences
    assert recorder.replays >= 4
    pair.check_logits(engine)


def test_other_steps_run_in_the_ordinary_way(llama):
    recorder = Recorder()
    engine = llama.engine(backend="triton", max_running=1, max_batch_tokens=4, record=recorder)
    assert llama.run(engine, {"a": PROMPTS["a"]}, 2)  # chunks of 4, 4 and 1 tokens, one decode
    assert recorder.recorded == 1
    assert recorder.replays == 2  # a chunk of one token is a decode like any other
    llama.check_logits(engine)


def test_steps_that_do_not_fit_run_in_the_ordinary_way(llama):
    recorder = Recorder()
    engine = llama.engine(backend="triton", max_running=1, record=recorder)
    for recorded in engine._runner._graphs._recorded.values():
        recorded.plan.update = lambda layout: False
    assert llama.run(engine, {"a": PROMPTS["a"]}, 3) == {"a": llama.greedy(PROMPTS["a"], 3)}
    assert recorder.replays == 0


def test_a_pass_that_waits_for_the_gpu_runs_without(llama, caplog, monkeypatch):
    @contextmanager
    def refused(device):
        raise RuntimeError("called a synchronizing CUDA operation")
        yield

    monkeypatch.setattr(graphs, "forbidden_waiting", refused)
    recorder = Recorder()
    engine = llama.engine(backend="triton", max_running=1, record=recorder)
    assert llama.run(engine, {"a": PROMPTS["a"]}, 3) == {"a": llama.greedy(PROMPTS["a"], 3)}
    assert "without CUDA graphs: called a synchronizing" in caplog.text
    assert recorder.recorded == 0


def test_memory_that_is_short_is_not_taken_for_a_pass_that_cannot_be_recorded(llama, monkeypatch):
    @contextmanager
    def short(device):
        raise torch.OutOfMemoryError
        yield

    monkeypatch.setattr(graphs, "forbidden_waiting", short)
    with pytest.raises(torch.OutOfMemoryError):
        llama.engine(backend="triton", max_running=1, record=Recorder())


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (8, [1, 2, 4, 8]), (17, [1, 2, 4, 8, 16, 24])],
)
def test_the_largest_size_is_just_enough(largest, sizes):
    assert list(graphs._sizes(largest)) == sizes


def test_the_largest_step_reads_the_longest_context_and_writes_nothing(llama):
    engine = llama.engine()
    pool = engine._runner.pool
    for tensor in pool.tensors:
        tensor[0].zero_()
    batch = largest_step(max_batch_tokens=24, max_running=4, max_kv_len=100, block_size=4)
    logits = engine._runner.run(batch)
    assert logits.shape == (24, 97)
    assert logits.isfinite().all()
    assert all(torch.isnan(tensor[1:]).all() and not tensor[0].any() for tensor in pool.tensors)
