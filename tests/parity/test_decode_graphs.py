"""Decode steps that are recorded once and replayed: what is replayed here is the recorded call."""

import pytest
import torch

from ragcache.engine.profile import largest_step

PROMPTS = {
    "a": [5, 17, 40, 8, 8, 61, 33, 90, 12],
    "b": [5, 17, 40, 8, 8, 61, 33, 90, 44, 3],
    "c": [7, 7, 1],
}


class Recorder:
    """Runs the recorded work anew, into the tensor that it gave first."""

    def __init__(self):
        self.sizes = []
        self.replays = 0

    def __call__(self, work):
        result = work().clone()
        self.sizes.append(len(result))

        def replay():
            self.replays += 1
            result.copy_(work())

        return result, replay


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_replayed_steps_agree_with_the_plain_model(make_pair, name):
    pair, recorder = make_pair(name), Recorder()
    engine = pair.engine(backend="triton", record=recorder)
    expected = {key: pair.greedy(prompt, 5) for key, prompt in PROMPTS.items()}
    assert pair.run(engine, PROMPTS, 5) == expected
    assert 4 in recorder.sizes  # three sequences, and one of padding
    assert recorder.replays >= 4
    pair.check_logits(engine)


def test_other_steps_run_in_the_ordinary_way(llama):
    recorder = Recorder()
    engine = llama.engine(backend="triton", max_running=2, max_batch_tokens=4, record=recorder)
    assert llama.run(engine, {"a": PROMPTS["a"]}, 2)  # chunks of 4, 4 and 1 tokens, one decode
    assert recorder.sizes == [1]
    assert recorder.replays == 2  # a chunk of one token is a decode like any other
    llama.check_logits(engine)


def test_sequences_beyond_the_recorded_length_run_in_the_ordinary_way(llama):
    recorder = Recorder()
    engine = llama.engine(backend="triton", record=recorder)
    engine._runner._graphs._max_kv_len = 4  # the table has room for one block
    assert llama.run(engine, {"a": PROMPTS["a"]}, 3) == {"a": llama.greedy(PROMPTS["a"], 3)}
    assert recorder.replays == 0


def test_a_pass_that_cannot_be_recorded_runs_without(llama, caplog):
    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    engine = llama.engine(backend="triton", record=refuse)
    assert llama.run(engine, {"a": PROMPTS["a"]}, 3) == {"a": llama.greedy(PROMPTS["a"], 3)}
    assert "without CUDA graphs: operation not permitted" in caplog.text


def test_the_largest_step_reads_the_longest_context_and_writes_nothing(llama):
    engine = llama.engine()
    pool = engine._runner._pool
    for tensor in pool.tensors:
        tensor[0].zero_()
    batch = largest_step(max_batch_tokens=24, max_running=4, max_kv_len=100, block_size=4)
    logits = engine._runner.run(batch)
    assert logits.shape == (24, 97)
    assert logits.isfinite().all()
    assert all(torch.isnan(tensor[1:]).all() and not tensor[0].any() for tensor in pool.tensors)
