"""From messages to text, over an engine whose model has no weights."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from ragcache.bench.hashing import HashRunner
from ragcache.config import ServeSettings
from ragcache.errors import ContextLengthExceeded, InvalidRequest, Overloaded, QueueTimeout
from ragcache.loading import start_engine
from ragcache.prompt.grammar import GrammarCompiler
from ragcache.prompt.tokenize import TokenizerPool
from ragcache.serving import ServedModel, Serving
from ragcache.types import (
    ChatPrompt,
    FinishReason,
    GenerateRequest,
    Message,
    MissReason,
    SamplingParams,
    Usage,
)

VOCAB = 49152
BLOCKS, BLOCK = 64, 16
LIMIT = 400


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    pool = TokenizerPool(smollm2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def grammars(smollm2, tokenizer):
    syntax = tokenizer.tool_format.syntax
    return GrammarCompiler(smollm2, vocab_size=VOCAB, eos_token_ids=[2], syntax=syntax)


@pytest.fixture
def runner():
    return HashRunner(BLOCKS, BLOCK, VOCAB)


@pytest.fixture
async def serving(tokenizer, grammars, runner):
    client = start_engine(runner, BLOCKS, ServeSettings(max_queue=4, max_running=4))
    model = ServedModel(("m",), LIMIT, BLOCKS * BLOCK, VOCAB, frozenset([2]), "fingerprint")
    yield Serving(model, tokenizer, client, grammars)
    client.engine.stop()


def chat(*texts):
    roles = ("user", "assistant")
    messages = [Message(roles[i % 2], text) for i, text in enumerate(texts)]
    return ChatPrompt((Message("system", "Be brief."), *messages))


def request(prompt="Once upon a time", name="r", max_tokens=12, **options):
    given = {key: options.pop(key) for key in ("stop", "tenant", "cache_salt") if key in options}
    sampling = SamplingParams(max_tokens, **{"temperature": 0.0, **options})
    return GenerateRequest(name, prompt, sampling, **given)


async def answer(serving, generate_request):
    generation = await serving.start(generate_request)
    deltas = [delta async for delta in generation]
    return generation, deltas


def text_of(deltas, index=0):
    return "".join(delta.text for delta in deltas if delta.index == index)


async def test_the_text_is_the_decoding_of_the_models_tokens(serving, runner, tokenizer):
    prompt = chat("What is a lighthouse?")
    generation, deltas = await answer(serving, request(prompt))
    context = (await tokenizer.encode_chat(prompt)).token_ids
    start = len(context)
    for _ in range(12):
        context.append(int(runner.logits(np.asarray(context)).argmax()))
    assert text_of(deltas) == tokenizer.prompts.vocabulary.decode(context[start:])
    assert generation.usage == Usage(start, 0, 12)
    assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.LENGTH]


async def test_the_second_turn_hits_the_first(serving):
    first, deltas = await answer(serving, request(chat("What is a lighthouse? " * 8)))
    assert first.usage.cached_tokens == 0
    turn = chat("What is a lighthouse? " * 8, text_of(deltas), "And a bridge?")
    second, _ = await answer(serving, request(turn, "s"))
    assert second.usage.cached_tokens >= (first.prompt_tokens - 1) // BLOCK * BLOCK > 0


async def test_what_was_dropped_before_its_reader_came_is_not_said_to_be_evicted(serving):
    prompt = chat("What is a lighthouse? " * 8)
    generation = await serving.start(request(prompt))
    while not serving.stats().computed_tokens:  # it is admitted, and nobody has read of it
        await asyncio.sleep(0.01)
    await serving.drop_cache("")
    async for _ in generation:
        pass
    again, _ = await answer(serving, request(prompt, "s"))
    assert again.usage.cached_tokens == 0
    assert again.explanation.reason is MissReason.COLD


async def test_a_stop_string_ends_the_text_before_it(serving):
    _, deltas = await answer(serving, request(max_tokens=40))
    whole = text_of(deltas)
    stop = whole[30:34]
    generation, deltas = await answer(serving, request(max_tokens=40, stop=(stop,), name="s"))
    assert text_of(deltas) == whole[: whole.index(stop)]
    assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.STOP]
    assert generation.usage.completion_tokens < 40


async def test_a_stop_string_that_never_comes_loses_nothing(serving):
    _, deltas = await answer(serving, request(max_tokens=20))
    whole = text_of(deltas)
    stop = whole[-3:] + "\0"
    _, deltas = await answer(serving, request(max_tokens=20, stop=(stop,), name="s"))
    assert text_of(deltas) == whole


async def test_a_stopped_choice_leaves_the_others_running(serving):
    options = {"max_tokens": 30, "n": 3, "temperature": 1.0, "seed": 5}
    _, deltas = await answer(serving, request(**options))
    texts = [text_of(deltas, index) for index in range(3)]
    assert len(set(texts)) == 3
    stop = texts[1][10:14]
    _, deltas = await answer(serving, request(**options, stop=(stop,), name="s"))
    assert text_of(deltas, 1) == texts[1][: texts[1].index(stop)]
    assert text_of(deltas, 0) == texts[0].split(stop)[0]
    assert sorted(d.index for d in deltas if d.finish_reason) == [0, 1, 2]


async def test_logprobs_spell_the_text(serving):
    _, deltas = await answer(serving, request(logprobs=2, max_tokens=8))
    logprobs = [each for delta in deltas for each in delta.logprobs]
    assert len(logprobs) == 8
    assert b"".join(each.bytes for each in logprobs).decode("utf-8", "replace") == text_of(deltas)
    for each in logprobs:
        assert len(each.top) == 2
        assert each.logprob == max(top.logprob for top in each.top)


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1, 3 * LIMIT])
async def test_a_prompt_without_room_for_output_is_refused_with_both_numbers(serving, length):
    with pytest.raises(ContextLengthExceeded, match=f"prompt is too long.*{length}.*{LIMIT}"):
        await serving.start(request(tuple([5] * length)))
    assert serving.stats().query_tokens == 0


async def test_a_prompt_that_can_never_fit_the_pool_is_refused_and_others_go_on(
    tokenizer, grammars, runner
):
    client = start_engine(runner, BLOCKS, ServeSettings())
    model = ServedModel(("m",), 10**6, BLOCKS * BLOCK, VOCAB, frozenset(), "fingerprint")
    serving = Serving(model, tokenizer, client, grammars)
    running = await serving.start(request(max_tokens=40))
    for prompt in (tuple([5] * BLOCKS * BLOCK), "word " * 3000):
        with pytest.raises(ContextLengthExceeded, match=str(BLOCKS * BLOCK)):
            await serving.start(request(prompt, "huge"))
    assert [delta async for delta in running][-1].finish_reason == FinishReason.LENGTH
    assert running.usage.completion_tokens == 40
    client.engine.stop()


async def test_output_is_clamped_to_the_room_that_is_left(serving):
    generation, _ = await answer(serving, request(tuple([5] * (LIMIT - 3)), max_tokens=None))
    assert generation.usage.completion_tokens == 3
    generation, _ = await answer(serving, request(tuple([5] * (LIMIT - 1)), max_tokens=10**12))
    assert generation.usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": (1, VOCAB)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"prompt": ChatPrompt(())}, "messages"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"stop_token_ids": frozenset([-3])}, "stop_token_ids"),
        ({"min_tokens": 13}, "min_tokens"),
    ],
)
async def test_bad_input_names_the_field(serving, options, param):
    with pytest.raises(InvalidRequest) as caught:
        await serving.start(request(**options))
    assert caught.value.param == param
    await answer(serving, request())


async def test_leaving_early_frees_everything(serving):
    generation = await serving.start(request(max_tokens=300))
    async for _ in generation:
        break
    await generation.aclose()
    while serving.stats().running:
        await asyncio.sleep(0.005)
    assert serving.stats().pool.held == 0


async def test_tenants_and_salts_share_nothing(serving):
    prompt = tuple(range(64))
    hits = []
    for tenant, salt in (("a", None), ("b", None), ("", "a"), ("a", "x"), ("a", None), ("a", "x")):
        generation, _ = await answer(serving, request(prompt, tenant=tenant, cache_salt=salt))
        hits.append(generation.usage.cached_tokens)
    assert hits == [0, 0, 0, 0, 48, 48]


async def test_more_requests_than_the_queue_holds_are_refused(serving):
    started = [await serving.start(request(name=str(i), max_tokens=300)) for i in range(8)]
    with pytest.raises(Overloaded):
        await serving.start(request(name="more"))
    for generation in started:
        await generation.aclose()
    await answer(serving, request(name="later"))


async def test_several_requests_start_together_or_not_at_all(serving):
    started = [await serving.start(request(name=str(i), max_tokens=300)) for i in range(6)]
    with pytest.raises(Overloaded):
        await serving.start_all([request(name=f"more {i}") for i in range(3)])
    foreign = request((1, VOCAB), name="foreign")
    with pytest.raises(InvalidRequest, match="token ids"):
        await serving.start_all([request(name="fine", max_tokens=300), foreign])
    assert list(serving._client._mailboxes._open) == [generation.id for generation in started]
    both = await serving.start_all([request(name=f"both {i}") for i in range(2)])
    for generation in (*started, *both):
        await generation.aclose()
    with pytest.raises(InvalidRequest, match="9 answers in one request"):
        await serving.start_all([request(name=str(i)) for i in range(9)])


async def test_a_place_is_left_at_the_end_not_when_the_answer_is_read(serving):
    started = [await serving.start(request(name=str(i), max_tokens=1)) for i in range(8)]
    deltas = [aiter(generation) for generation in started]
    for each in deltas:
        assert [delta async for delta in each]
    assert len(await serving.start_all([request(name=f"later {i}") for i in range(8)])) == 8


async def test_reading_a_prompt_counts_as_waiting(serving, tokenizer, monkeypatch):
    async def slow(*args):
        await asyncio.sleep(60)

    monkeypatch.setattr(tokenizer, "encode_text", slow)
    client = serving._client
    monkeypatch.setattr(client, "limits", replace(client.limits, queue_timeout=0.05))
    with pytest.raises(QueueTimeout):
        await serving.start(request())
    assert len(await serving.start_all([request((1, 2), name=str(i)) for i in range(8)])) == 8


async def test_an_engine_that_hangs_in_its_first_step_is_not_ready(serving, runner, monkeypatch):
    assert serving.ready() is None
    go_on, run = threading.Event(), runner.run
    runner.run = lambda batch, meanwhile: meanwhile() or (go_on.wait(60) and run(batch))
    monkeypatch.setattr("ragcache.serving.serving.STALLED_AFTER", 0.05)
    try:
        generation = await serving.start(request(max_tokens=1))
        async with asyncio.timeout(30):
            while serving.ready() is None:
                await asyncio.sleep(0.01)
        assert "no step for" in serving.ready()
    finally:
        go_on.set()
    assert [delta async for delta in generation][-1].finish_reason == FinishReason.LENGTH
    assert serving.ready() is None


async def test_a_history_of_many_contexts_is_counted(serving, tokenizer):
    history = chat(*["lorem ipsum dolor " * 100] * 100)
    counted = await serving.count_tokens(history, "")
    assert counted == len((await tokenizer.encode_chat(history)).token_ids) > 64 * LIMIT


async def test_counting_is_bounded(serving, monkeypatch):
    prompt = chat("lorem ipsum dolor " * 200)
    counted = await serving.count_tokens(prompt, "")
    monkeypatch.setattr("ragcache.serving.serving.COUNTED", counted)
    assert await serving.count_tokens(prompt, "") == counted > LIMIT
    monkeypatch.setattr("ragcache.serving.serving.COUNTED", counted - 1)
    with pytest.raises(ContextLengthExceeded, match=f"the maximum is {counted - 1}"):
        await serving.count_tokens(prompt, "")


async def test_counting_has_places_of_its_own(serving, tokenizer, monkeypatch):
    go_on = asyncio.Event()

    async def slow(*args):
        await go_on.wait()
        return 7

    monkeypatch.setattr(tokenizer, "count_tokens", slow)
    counts = [asyncio.create_task(serving.count_tokens(chat("x"), "")) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await serving.count_tokens(chat("x"), "")
    assert len(await serving.start_all([request(name=str(i)) for i in range(8)])) == 8
    counts.pop().cancel()
    go_on.set()
    assert await asyncio.gather(*counts) == [7] * 7


async def test_what_can_be_served_can_be_counted(serving, monkeypatch):
    monkeypatch.setattr("ragcache.serving.serving.COUNTED", 1)
    assert await serving.count_tokens(chat("lorem ipsum dolor"), "") < LIMIT
