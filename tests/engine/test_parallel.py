"""Two ranks answer like one process, and neither outlives the other."""

import asyncio
import signal

import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from ragcache.config import ServeSettings
from ragcache.embedded import EmbeddedGateway
from ragcache.engine import assembly, pool
from ragcache.engine.parallel import check_devices, check_split, smallest
from ragcache.engine.workers import Worker, Workers
from ragcache.errors import ConfigError, EngineUnavailable, UnsupportedModel

CPU = torch.device("cpu")
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_blocks": 64,
    "host_cache_memory": "4MiB",
    "max_batch_tokens": 48,
    "served_model_name": ["tiny"],
}
MESSAGES = [
    {"role": "system", "content": "You keep a lighthouse and its log. " * 20},
    {"role": "user", "content": "Is it lit?"},
]


@pytest.fixture(scope="module")
def whole(tiny_llama):
    gateway = EmbeddedGateway.load(str(tiny_llama), **OPTIONS)
    yield gateway
    gateway.close()


@pytest.fixture(scope="module")
def split(tiny_llama):
    gateway = EmbeddedGateway.load(str(tiny_llama), **OPTIONS, tensor_parallel_size=2)
    yield gateway
    gateway.close()


def body(**options):
    return {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
        "ignore_eos": True,
        **options,
    }


def children():
    return set(psutil.Process().children())


@pytest.fixture
def others():
    """Child processes from before the test: servers that other tests have left running."""
    return children()


def texts(response):
    return [choice["message"]["content"] for choice in response["choices"]]


def logprobs(response):
    return torch.tensor(
        [
            top["logprob"]
            for choice in response["choices"]
            for token in choice["logprobs"]["content"]
            for top in token["top_logprobs"]
        ]
    )


def cached(response):
    return response["usage"]["prompt_tokens_details"]["cached_tokens"]


async def ask_both(whole, split, **options):
    """The split engine's response, which must be what one process says."""
    expected = await whole.complete(body(**options))
    response = await split.complete(body(**options))
    assert texts(response) == texts(expected)
    torch.testing.assert_close(logprobs(response), logprobs(expected), atol=1e-4, rtol=1e-4)
    assert response["usage"] == expected["usage"]
    return response


async def test_a_prompt_in_chunks_and_its_hits_are_those_of_one_process(whole, split):
    cold = await ask_both(whole, split, cache_salt="chunks")
    assert cold["usage"]["prompt_tokens"] > 3 * OPTIONS["max_batch_tokens"]
    assert cached(cold) == 0
    warm = await ask_both(whole, split, cache_salt="chunks")
    assert cached(warm) == (warm["usage"]["prompt_tokens"] - 1) // 16 * 16
    assert texts(warm) == texts(cold)


async def test_choices_that_part_are_those_of_one_process(whole, split):
    response = await ask_both(whole, split, n=3, temperature=1, seed=5, max_tokens=20)
    assert len(set(texts(response))) == 3


async def test_requests_together_are_answered_as_alone(split):
    bodies = [body(messages=[*MESSAGES, {"role": "user", "content": f"{i}"}]) for i in range(4)]
    together = await asyncio.gather(*map(split.complete, bodies))
    alone = [await split.complete({**each, "cache_salt": "alone"}) for each in bodies]
    assert list(map(texts, together)) == list(map(texts, alone))


async def test_what_was_evicted_comes_back_on_all_ranks(whole, split):
    for salt in range(8):  # some 15 blocks each
        await ask_both(whole, split, cache_salt=f"{salt}")
    before = split.serving.stats().host
    warm = await ask_both(whole, split, cache_salt="0")
    assert cached(warm) == (warm["usage"]["prompt_tokens"] - 1) // 16 * 16
    after = split.serving.stats().host
    assert after.hit_tokens - before.hit_tokens == cached(warm)
    assert after.pool.total == whole.serving.stats().host.pool.total


def test_a_split_model_has_a_name_of_its_own(whole, split):
    assert split.fingerprint != whole.fingerprint


def test_a_process_joins_one_group_only(split):
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: .* uses torch\.distributed"):
        check_devices(CPU, 2)


async def test_a_worker_that_is_killed_ends_the_engine_and_all_requests(split):
    (worker,) = (child for child in children() if "ragcache.worker" in child.cmdline())
    stream = split.stream(body(max_tokens=2000))
    await anext(stream)
    worker.send_signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        with pytest.raises(EngineUnavailable):
            async for _ in stream:
                pass
    assert "failed" in split.serving.ready()
    with pytest.raises(EngineUnavailable):
        await split.complete(body())
    split.close()
    assert not worker.is_running()
    assert not dist.is_initialized()


def test_what_keeps_a_worker_from_starting_is_told(tiny_llama, monkeypatch, others):
    environment = Worker._environment
    monkeypatch.setattr(
        Worker, "_environment", lambda self: environment(self) | {"RAGCACHE_LIGHTHOUSE": "1"}
    )
    settings = ServeSettings(model=str(tiny_llama), tensor_parallel_size=2, **OPTIONS)
    with pytest.raises(ConfigError, match=r"(?s)tensor_parallel_size: rank 1 failed: .*LIGHTHOUSE"):
        Workers(settings, CPU)
    assert not children() - others


def test_heads_that_cannot_be_shared_out_are_refused_at_once():
    with pytest.raises(ConfigError, match="2 does not divide the model's 9 attention heads and 3"):
        EmbeddedGateway.load(tensor_parallel_size=2, device="cpu")


def test_models_that_nobody_has_compared_are_refused():
    with pytest.raises(UnsupportedModel, match="tensor_parallel_size: model type gpt2 "):
        check_split(AutoConfig.for_model("gpt2"), 2)


def test_ranks_without_gpus_share_the_hosts_memory(monkeypatch):
    monkeypatch.setattr(pool, "free_memory", lambda device: 10_000)
    assert pool.pool_blocks(10, None, CPU) == 400
    assert pool.pool_blocks(10, None, CPU, ranks=2) == 200
    assert pool.pool_blocks(10, 5_000, CPU, ranks=2) == 500


def test_a_rank_needs_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="tensor_parallel_size: 2 ranks need a GPU each"):
        check_devices(torch.device("cuda"), 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: .*CUDA_VISIBLE_DEVICES="):
        check_devices(CPU, 2)


def test_a_worker_that_is_lost_during_the_start_is_named(tiny_llama, monkeypatch, others):
    def lose_it(value, device):
        (children() - others).pop().kill()
        return smallest(value, device)

    monkeypatch.setattr(assembly, "smallest", lose_it)
    with pytest.raises(ConfigError, match="tensor_parallel_size: rank 1 ended with status -9"):
        EmbeddedGateway.load(str(tiny_llama), **OPTIONS | {"tensor_parallel_size": 2})
    assert not children() - others
