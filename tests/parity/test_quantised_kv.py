"""Quantised keys and values: what is read is what was written, so a hit changes no answer.

The reference runs the model from scratch, densely, over rows that went through quantising. The
engine must agree with it however it came to a token. Where it computes a row with another batch,
the last bit may differ, and now and then a value then rounds to the next step: on these models
that moves logits by up to 0.002 (int8) or 0.02 (fp8), less than quantising moves any of them.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

PROMPT = [5, 17, 40, 8, 8, 61, 33, 90, 12, 7, 77, 25, 50]  # three blocks and one token
COUNT = 5
TOLERANCE = {torch.int8: 0.01, torch.float8_e4m3fn: 0.08}


def check(pair, engine, kv_dtype):
    reference = partial(pair.quantised_reference, kv_dtype=kv_dtype)
    pair.check_logits(engine, TOLERANCE[kv_dtype], reference)


@pytest.fixture(params=[torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def kv_dtype(request):
    return request.param


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_cold_warm_and_caching_off_agree(make_pair, name, kv_dtype):
    pair, answers = make_pair(name), []
    for share in (True, False):
        engine = pair.engine(share=share, kv_dtype=kv_dtype)
        for _ in ("cold", "warm"):
            answers.append(pair.run(engine, {"a": PROMPT}, COUNT))
            check(pair, engine, kv_dtype)
        assert engine.stats.hit_tokens == (12 if share else 0)
    assert all(answer == answers[0] for answer in answers)


def test_a_hit_gives_bit_for_bit_the_logits_of_whoever_wrote_it(llama, kv_dtype):
    engine = llama.engine(max_batch_tokens=12, kv_dtype=kv_dtype)  # the last token alone, as warm
    rows = []
    for _ in ("cold", "warm"):
        llama.run(engine, {"a": PROMPT}, COUNT)
        rows.append(torch.stack([row for _, row in engine.logits]))
        engine.logits.clear()
    assert torch.equal(*rows)
    assert engine.stats.hit_tokens == 12


@pytest.mark.parametrize("chunk", [1, 3, 4, 5])
def test_any_chunk_size_agrees(llama, kv_dtype, chunk):
    engine = llama.engine(max_batch_tokens=chunk, max_running=1, kv_dtype=kv_dtype)
    llama.run(engine, {"a": PROMPT}, 3)
    check(llama, engine, kv_dtype)


def test_batches_over_a_shared_prefix_agree(llama, kv_dtype):
    prompts = {str(i): [*PROMPT[: 8 + i], 3 * i + 1] for i in range(5)}
    engine = llama.engine(max_batch_tokens=7, max_running=6, kv_dtype=kv_dtype)
    llama.run(engine, prompts, COUNT)
    check(llama, engine, kv_dtype)
    assert engine.stats.hit_tokens > 0


def test_preemption_and_forks_agree(llama, kv_dtype):
    prompts = {str(i): [i + 3, *PROMPT[:7]] for i in range(3)}
    engine = llama.engine(num_blocks=9, max_running=4, kv_dtype=kv_dtype)
    llama.run(engine, prompts, 12)
    assert engine.stats.preemptions > 0
    llama.run(engine, {"forked": PROMPT[:6]}, 4, n=3)  # copies a block, and its scales
    check(llama, engine, kv_dtype)


def test_blocks_that_were_swapped_out_and_in_agree(llama, kv_dtype):
    prompts = {str(i): [i + 3, *range(5, 25)] for i in range(4)}
    engine = llama.engine(num_blocks=8, host_blocks=30, kv_dtype=kv_dtype)
    for _ in ("cold", "warm"):
        for name, prompt in prompts.items():
            llama.run(engine, {name: prompt}, 3)
    check(llama, engine, kv_dtype)
    assert engine.stats.host.hit_tokens > 0


def test_the_gpu_kernels_agree(llama):
    """In int8: the interpreter rounds to float8 wrongly."""
    engine = llama.engine(backend="triton", max_batch_tokens=7, kv_dtype=torch.int8)
    for _ in ("cold", "warm"):
        llama.run(engine, {"a": PROMPT}, 2)
    assert engine.stats.hit_tokens == 12
    llama.run(engine, {"forked": PROMPT[:6]}, 3, n=2)
    check(llama, engine, torch.int8)


@pytest.mark.parametrize(
    ("kv_dtype", "tolerance"), [(torch.int8, 2.0), (torch.float8_e4m3fn, 4.0)], ids=str
)
def test_the_embedded_model_answers_as_with_exact_keys_and_values(embedded, kv_dtype, tolerance):
    """Logits around 7 move by 0.2 (int8) or 0.4 (fp8), and at most by half of the tolerance."""
    prompt = [504, 1194, 282, 260, 5895, 314, 281, 3575, 282, 2988, 30, 339, 506, 253, 3365, 284, 1]
    engine = embedded.engine(kv_dtype=kv_dtype)
    for _ in ("cold", "warm"):
        answer = embedded.run(engine, {"a": prompt}, 6)
        assert answer == {"a": embedded.greedy(prompt, 6)}
        embedded.check_logits(engine, tolerance)
    assert engine.stats.hit_tokens == 16
