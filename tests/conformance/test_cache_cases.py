"""The cache never changes an answer, and nobody reads what is not theirs."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ragcache.bench.prose import prose
from ragcache.config import ServeSettings
from ragcache.engine.model import fingerprint
from ragcache.loading import assemble
from ragcache.types import GenerateRequest, SamplingParams

BLOCK = 16
COMPLETIONS = "/v1/completions"


def words(seed, count):
    return prose(random.Random(seed), count)


def cached(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def complete(gateway):
    """Completes a raw prompt; a prompt is cold under a salt that was not used before."""
    gateway.script.free = True

    def complete(prompt, **options):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **options}
        response = gateway.http.post(COMPLETIONS, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    return complete


def texts(answer):
    return [choice["text"] for choice in answer["choices"]]


def test_writers_behind_one_half_filled_block_do_not_disturb_each_other(gateway, complete):
    shared = [1000 + i for i in range(3 * BLOCK - 5)]
    branches = [[*shared, 7], [*shared, 8, 9], [*shared, 5, 6, 4], shared]
    options = [{}, {}, {}, {"n": 3, "seed": 1, "temperature": 1}]
    alone = [
        texts(complete(branch, cache_salt=f"alone {i}", **option))
        for i, (branch, option) in enumerate(zip(branches, options, strict=True))
    ]
    assert len({text for each in alone for text in each}) == 6
    with ThreadPoolExecutor(len(branches)) as pool:
        for turn in range(5):

            def answer(branch, option, salt=f"together {turn}"):
                return texts(complete(branch, cache_salt=salt, **option))

            assert list(pool.map(answer, branches, options)) == alone
    assert gateway.at_rest().pool.held == 0


def test_an_answer_is_not_cached(complete):
    warm = [complete(words(2, 60), temperature=1.2) for _ in range(8)]
    assert len({text for answer in warm for text in texts(answer)}) >= 3
    hits = [cached(answer["usage"]) for answer in warm]
    assert hits[0] == 0
    assert min(hits[1:]) > 0


def test_sampling_is_no_part_of_the_key(complete):
    cold, hot, again = (complete(words(3, 60), temperature=t) for t in (0, 1, 0))
    assert cached(cold["usage"]) == 0
    assert min(cached(hot["usage"]), cached(again["usage"])) > 0
    assert texts(cold) == texts(again) != texts(hot)


def test_an_echo_has_the_same_log_probabilities_cold_and_warm(complete):
    prompt = words(4, 60)
    cold, warm = (complete(prompt, echo=True, logprobs=2) for _ in range(2))
    values = cold["choices"][0]["logprobs"]
    assert values == warm["choices"][0]["logprobs"]
    tokens = values["tokens"]
    assert len(tokens) == cold["usage"]["total_tokens"]
    assert "".join(tokens).startswith(prompt)
    assert cached(warm["usage"]) == 0  # the whole prompt went through the model again
    assert cached(complete(prompt)["usage"]) > 0


def test_log_probabilities_of_a_prompt_are_refused_where_there_are_none(gateway):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    response = gateway.http.post("/v1/chat/completions", json={**body, "prompt_logprobs": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert gateway.http.post("/v1/chat/completions", json=body).status_code == 200


def leave(gateway, body, computed_tokens):
    """Send a request, and close the connection once so many tokens went through the model."""
    before = gateway.serving.stats().computed_tokens
    url = gateway.http.base_url
    with closing(HTTPConnection(url.host, url.port)) as connection:
        connection.request("POST", COMPLETIONS, json.dumps(body))
        while gateway.serving.stats().computed_tokens < before + computed_tokens:
            time.sleep(0.0005)


def test_a_client_that_leaves_during_prefill_leaves_only_valid_blocks(make_gateway):
    settings = ServeSettings(max_running=4, max_queue=4, max_batch_tokens=2 * BLOCK)
    prompt = list(range(500, 500 + 40 * BLOCK))
    body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    hits = []
    with make_gateway(settings=settings) as gateway:
        gateway.script.free = True

        def answer(salt):
            request = {**body, "prompt": [*prompt, 1, 2, 3], "cache_salt": salt, "stream": False}
            answer = gateway.http.post(COMPLETIONS, json=request).json()
            return cached(answer["usage"]), answer["choices"][0]

        cold, expected = answer("cold")
        for tokens in (1, 100, 200, 300, 400):
            salt = f"left after {tokens}"
            leave(gateway, {**body, "prompt": prompt, "cache_salt": salt, "stream": True}, tokens)
            assert gateway.at_rest().pool.held == 0
            hit, choice = answer(salt)
            assert choice == expected
            hits.append(hit)
    assert cold == 0 < max(hits)


def test_preemption_is_invisible_in_a_stream(make_gateway):
    settings = ServeSettings(max_running=2, max_queue=4, max_batch_tokens=64)
    body = {"model": "tiny", "max_tokens": 150, "temperature": 0}
    with make_gateway(num_blocks=30, settings=settings) as gateway:
        gateway.script.free = True
        bodies = [{**body, "prompt": [100 + i] * 150} for i in range(2)]
        alone = [gateway.http.post(COMPLETIONS, json=each).json() for each in bodies]
        assert gateway.at_rest().preemptions == 0
        with ThreadPoolExecutor(2) as pool:
            usage = {"stream_options": {"include_usage": True}}
            streams = pool.map(lambda each: gateway.events(COMPLETIONS, each | usage), bodies)
            for solo, (*chunks, last) in zip(alone, streams, strict=True):
                said = "".join(chunk["choices"][0]["text"] for chunk in chunks)
                assert said == solo["choices"][0]["text"]
                assert last["usage"]["completion_tokens"] == 150
        assert gateway.at_rest().preemptions > 0


def test_names_of_one_model_share_its_cache(complete):
    assert cached(complete(words(5, 60))["usage"]) == 0
    assert cached(complete(words(5, 60), model="alias")["usage"]) > 0


async def test_other_weights_share_nothing(gateway, smollm2):
    model = replace(gateway.serving.model, fingerprint="other weights")
    other = assemble(model, smollm2, gateway.serving._client)
    prompt = tuple(range(600, 600 + 4 * BLOCK))
    hits = []
    for serving in (gateway.serving, other) * 2:
        generation = await serving.start(
            GenerateRequest(f"r{len(hits)}", prompt, SamplingParams(1))
        )
        assert [delta async for delta in generation]
        hits.append(generation.usage.cached_tokens)
    other._tokenizer.close()
    assert hits == [0, 0, 3 * BLOCK, 3 * BLOCK]


def test_any_weight_makes_another_fingerprint():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, num_hidden_layers=1, **sizes))
    prints = [fingerprint(model, torch.float32), fingerprint(model, torch.float32)]
    for weight in model.parameters():
        with torch.no_grad():
            weight.flatten()[0] += 1
        prints.append(fingerprint(model, torch.float32))
    assert prints[0] == prints[1]
    assert len(set(prints)) == len(prints) - 1


def test_keys_and_salts_never_run_together(make_gateway):
    places = [("a", "bc"), ("ab", "c"), ("abc", None), ("a", "b"), ("abc", "a")]
    body = {"model": "tiny", "prompt": list(range(4 * BLOCK)), "max_tokens": 1}
    with make_gateway(api_keys=["a", "ab", "abc"]) as gateway:

        def hit(key, salt):
            headers = {"Authorization": f"Bearer {key}"}
            request = {**body, "cache_salt": salt}
            answer = gateway.http.post(COMPLETIONS, json=request, headers=headers).json()
            return cached(answer["usage"])

        assert [hit(*place) for place in places] == [0] * len(places)
        assert [hit(*place) for place in places] == [3 * BLOCK] * len(places)
