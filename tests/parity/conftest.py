"""Tiny random models of many architectures, each beside its plain transformers forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ragcache_kernels import AttentionBackend, LayerCache, StepLayout, get_backend
from ragcache_kernels.quantise import quantise
from ragcache_kernels.reference import reference_attention
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ragcache.engine.answers import Answers
from ragcache.engine.attention import AttentionCall, ForwardContext, forward_context
from ragcache.engine.batch import StepBatch
from ragcache.engine.fast_model import use_fast_layers
from ragcache.engine.graphs import DecodeGraphs, Limits, Record
from ragcache.engine.host_pool import host_pool
from ragcache.engine.loop import Engine
from ragcache.engine.model import load_model
from ragcache.engine.pool import KVPool
from ragcache.engine.profile import largest_step
from ragcache.engine.request import Chunk, Request
from ragcache.engine.runner import ModelRunner
from ragcache.engine.scheduler import Scheduler
from ragcache.engine.source import find_model
from ragcache.engine.step_cost import StepCost
from ragcache.engine.support import prepare_model
from ragcache.prefix.cache import PrefixCache
from ragcache.types import Prefilled, SamplingParams, Token, TokenLogprob

VOCAB = 97
BLOCK = 4

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "head_dim": 8}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWED = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}

ARCHITECTURES = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    "qwen3_moe": {
        **_GROUPED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
    },
    "mistral": {**_GROUPED, "sliding_window": 6},
    "mixtral": {**_GROUPED, **_MOE},
    "gemma": {**_GROUPED, "num_key_value_heads": 1},
    "gemma2": {
        **_GROUPED,
        **_WINDOWED,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text": {**_GROUPED, **_WINDOWED, "query_pre_attn_scalar": 8},
    "phi": _COMMON,
    "phi3": {**_GROUPED, "rope_scaling": None},
    "olmo2": _GROUPED,
    "granite": {**_GROUPED, "attention_multiplier": 0.3, "logits_scaling": 0.5},
    "starcoder2": _GROUPED,
    "cohere": _GROUPED,
    "gpt_neox": _COMMON,
    "stablelm": _GROUPED,
    "smollm3": {**_GROUPED, "no_rope_layers": [1, 0]},
    "gpt2": _GPT2,
    "gptj": {**_GPT2, "rotary_dim": 8},
    "gpt_bigcode": {**_GPT2, "multi_query": True},
    "codegen": {**_GPT2, "rotary_dim": 8},
    "opt": {**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_oss": {**_GROUPED, **_MOE, **_WINDOWED},
    "deepseek_v3": {
        **_COMMON,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "glm4": _GROUPED,
    "olmo3": {**_GROUPED, **_WINDOWED},
    "ministral": {**_GROUPED, **_WINDOWED},
}


def build(name: str, options: dict) -> PreTrainedModel:
    """A random float32 model with eager attention, the same at every call."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases of zeros and norms of ones would hide that one is lost
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


class RecordingAnswers(Answers):
    """Keeps all logits that it gets, each with its context."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.logits: list[tuple[list[int], Tensor]] = []

    def extend(self, chunks: list[Chunk], logits: Tensor) -> None:
        rows = iter(logits)
        for chunk in chunks:
            stop = chunk.start + chunk.count
            for end in range(stop - chunk.num_logits + 1, stop + 1):
                context = (chunk.sequence.tokens + chunk.draft)[:end]
                self.logits.append((context, next(rows).clone()))
        super().extend(chunks, logits)


class RecordingEngine(Engine):
    """An engine that shows what its model said."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, sink: _Sink) -> None:
        super().__init__(runner, scheduler, sink)
        self._answers = RecordingAnswers(scheduler)

    @property
    def logits(self) -> list[tuple[list[int], Tensor]]:
        return self._answers.logits


class _Sink:
    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprob | None]] = {}
        self.prompt_logprobs: dict[str, tuple[TokenLogprob, ...]] = {}

    def deliver(self, events) -> None:
        for request_id, event in events:
            if isinstance(event, Token) and event.index == 0:
                self.tokens.setdefault(request_id, []).append(event.token_id)
                self.logprobs.setdefault(request_id, []).append(event.logprob)
            elif isinstance(event, Prefilled):
                self.prompt_logprobs[request_id] = event.logprobs

    def fail(self, error) -> None:
        raise error


class _Dense(ForwardContext):
    """Attention of one sequence in float64, over rows that were quantised."""

    def __init__(self, kv_dtype: torch.dtype) -> None:
        self._kv_dtype = kv_dtype

    def attend(self, call: AttentionCall) -> Tensor:
        count = len(call.query)
        layout = StepLayout(
            cu_q=torch.tensor([0, count]),
            kv_len=torch.tensor([count]),
            block_table=torch.tensor([[0]]),
            slot_mapping=torch.arange(count),
            block_size=count,
        )
        written = (quantise(each, self._kv_dtype) for each in (call.key, call.value))
        rows, scales = zip(*written, strict=True)
        cache = LayerCache(*(each[None] for each in rows + scales))
        out = reference_attention(call.query, cache, layout, call.spec)
        return out.to(call.query.dtype)


class Pair:
    """One architecture twice: plain, and as it is served."""

    def __init__(
        self, plain: PreTrainedModel, kernels: AttentionBackend[Any] | None = None
    ) -> None:
        self.plain = plain
        self.paged = copy.deepcopy(plain)
        self.layers = prepare_model(self.paged)
        self.fast_layers = use_fast_layers(self.paged, kernels or get_backend("torch"))

    def engine(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = BLOCK,
        max_batch_tokens: int = 512,
        max_running: int = 8,
        share: bool = True,
        backend: str = "torch",
        record: Record | None = None,
        host_blocks: int = 0,
        kv_dtype: torch.dtype | None = None,
        cost: StepCost | None = None,
        max_draft: int = 0,
    ) -> RecordingEngine:
        kv_dtype = kv_dtype or self.plain.dtype
        pool = KVPool(self.layers, num_blocks, block_size, kv_dtype, torch.device("cpu"))
        for tensor in pool.tensors:
            # Reading a slot that was never written must not go unseen; integers have scales.
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
        cache = PrefixCache(num_blocks, block_size, share=share, host_blocks=host_blocks)
        scheduler = Scheduler(
            cache,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            cost=cost,
            max_draft=max_draft,
        )
        kernels, graphs = get_backend(backend), None
        if record is not None:
            limits = Limits(
                max_running, num_blocks * block_size, num_blocks * block_size, block_size
            )
            graphs = DecodeGraphs(kernels, self.plain.device, limits, record)
        host = host_pool(pool.tensors, host_blocks * pool.block_bytes) if host_blocks else None
        runner = ModelRunner(self.paged, pool, kernels, graphs, host)
        if graphs is not None:
            _warm_up(runner, pool, largest_step(16, max_running, 32, block_size))
        return RecordingEngine(runner, scheduler, _Sink())

    def run(
        self, engine: RecordingEngine, prompts: dict[str, list[int]], count: int, **options: Any
    ) -> dict[str, list[int]]:
        """Answer all prompts at once, greedily; returns the tokens of each."""
        grammar = options.pop("grammar", None)
        sampling = SamplingParams(count, **{"temperature": 0.0, **options})
        for name, prompt in prompts.items():
            engine._answers.add(Request(name, prompt, sampling, b"n", frozenset(), grammar))
        while engine._scheduler.busy:
            engine._step()
            engine._flush()
            engine._cache.check()
        return {name: engine._sink.tokens.pop(name) for name in prompts}

    @torch.inference_mode()
    def reference(self, context: list[int]) -> Tensor:
        """Logits after each token of `context`, from scratch by transformers alone."""
        return self.plain(input_ids=torch.tensor([context]), use_cache=False).logits[0]

    @torch.inference_mode()
    def quantised_reference(self, context: list[int], kv_dtype: torch.dtype) -> Tensor:
        """The same for keys and values that were quantised, from scratch and without pages."""
        ids = torch.tensor([context])
        positions = torch.arange(len(context))[None]
        with forward_context(_Dense(kv_dtype)):
            return self.paged(input_ids=ids, position_ids=positions, use_cache=False).logits[0]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The answer of the plain model."""
        context = list(prompt)
        for _ in range(count):
            context.append(int(self.reference(context)[-1].argmax()))
        return context[len(prompt) :]

    def check_logits(
        self,
        engine: RecordingEngine,
        tolerance: float = 1e-4,
        reference_of: Callable[[list[int]], Tensor] | None = None,
    ) -> None:
        """Compare everything that the engine sampled from with the plain model."""
        assert engine.logits
        reference_of = reference_of or self.reference
        reference: dict[tuple[int, ...], Tensor] = {}
        for context, logits in sorted(engine.logits, key=lambda each: -len(each[0])):
            if tuple(context) not in reference:
                rows = reference_of(context)
                reference |= {tuple(context[: i + 1]): row for i, row in enumerate(rows)}
            expected = reference[tuple(context)]
            assert expected.std() > 0.05  # a flat answer would prove nothing
            torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)
        engine.logits.clear()


def _warm_up(runner: ModelRunner, pool: KVPool, largest: StepBatch) -> None:
    """Where block 0 is read, the interpreter complains about NaN."""
    for tensor in pool.tensors:
        tensor[0] = 0.0
    runner.warm_up(largest)
    for tensor in pool.tensors:
        tensor[0] = torch.nan


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Threads cost more than they bring on tiny tensors, above all when the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(build(request.param, ARCHITECTURES[request.param]))


@pytest.fixture(scope="session")
def make_pair():
    """One of the architectures in a given dtype, with other options, or altered."""

    def make(
        name: str,
        dtype: torch.dtype = torch.float32,
        alter: Callable[[PreTrainedModel], object] = id,
        kernels: AttentionBackend[Any] | None = None,
        **options: Any,
    ) -> Pair:
        model = build(name, {**ARCHITECTURES[name], **options}).to(dtype)
        alter(model)
        return Pair(model, kernels)

    return make


@pytest.fixture(scope="session")
def llama(make_pair) -> Pair:
    return make_pair("llama")


@pytest.fixture(scope="session")
def embedded() -> Pair:
    """The embedded model in float32."""
    source, cpu = find_model(None), torch.device("cpu")
    return Pair(load_model(source, cpu, torch.float32))


@pytest.fixture(scope="session")
def tiny_model():
    return build


@pytest.fixture(scope="session")
def architectures() -> dict[str, dict]:
    """The configuration of each tiny model."""
    return ARCHITECTURES
