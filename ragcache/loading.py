"""From settings to a running `Serving`: model, pool, engine thread, tokenizers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from math import isinf

from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from ragcache.config import ServeSettings
from ragcache.engine.assembly import build_runner, max_model_len
from ragcache.engine.bridge import EngineClient, Limits, Mailboxes
from ragcache.engine.loop import Engine
from ragcache.engine.messenger import Messenger
from ragcache.engine.model import (
    check_kv_dtype,
    check_quantization,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    eos_token_ids,
    fingerprint,
    load_config,
    load_model,
)
from ragcache.engine.parallel import check_devices, check_split
from ragcache.engine.runner import ModelRunner, Runner
from ragcache.engine.scheduler import Scheduler
from ragcache.engine.source import ModelSource, find_model
from ragcache.engine.step_cost import StepCost
from ragcache.engine.swap_costs import measure
from ragcache.engine.workers import ParallelRunner, Workers
from ragcache.prefix.cache import PrefixCache
from ragcache.prefix.events import BlockSink
from ragcache.prompt.grammar import GrammarCompiler
from ragcache.prompt.loader import load_tokenizer
from ragcache.prompt.tokenize import TokenizerPool
from ragcache.serving import ServedModel, Serving

log = logging.getLogger(__name__)

MAX_STEP_TIME = 0.5  # seconds, on a CPU; shorter chunks cost the other prompts more than it helps
SMALL_MODELS_STRINGS = 200  # characters; the embedded model would go on until its tokens run out


def load_serving(settings: ServeSettings, sink: BlockSink | None = None) -> Serving:
    """Load everything and start the engine; takes seconds to minutes, so not on an event loop.

    `sink` is told which blocks can be found.

    Raises:
        ConfigError: naming the option that cannot be honoured.
    """
    if settings.log_format == "json":
        disable_progress_bar()  # which would stand between the lines
    source = find_model(settings.model)
    with ExitStack() as undo:
        workers = start_workers(source, settings)
        if workers is not None:
            undo.callback(workers.close)
        with workers.needed() if workers else nullcontext():
            serving = _load(settings, source, workers, sink, undo)
        undo.pop_all()
    return serving


def _load(
    settings: ServeSettings,
    source: ModelSource,
    workers: Workers | None,
    sink: BlockSink | None,
    undo: ExitStack,
) -> Serving:
    """The rest of `load_serving`; `undo` takes what must be undone if it fails."""
    loaded = load_runner(settings, workers.meet if workers else lambda: None)
    undo.callback(loaded.runner.close)
    log.info("loading the tokenizer of %s", source.name)
    tokenizer = load_tokenizer(source.location)
    served = _describe(loaded, source, settings)
    log.info(
        "loaded %s, KV pool of %d tokens in %s",
        served.names[0],
        served.pool_tokens,
        loaded.runner.kv_dtype,
    )
    is_small = settings.model is None
    strings = settings.max_string_length or (SMALL_MODELS_STRINGS if is_small else None)
    runner = ParallelRunner(loaded.runner, workers) if workers else loaded.runner
    host_blocks, min_swap = measure_host_tier(runner, loaded, served.max_model_len, settings)
    client = start_engine(runner, loaded.num_blocks, settings, host_blocks, min_swap, sink)
    undo.callback(client.engine.stop)
    if workers is not None:
        workers.watch(client.engine.fail)
    return assemble(served, tokenizer, client, max_string_length=strings)


def start_workers(source: ModelSource, settings: ServeSettings) -> Workers | None:
    """The ranks above this process, if there are to be any; for rank 0.

    Raises ConfigError when the model or the machine does not allow it.
    """
    ranks = settings.tensor_parallel_size
    if ranks == 1:
        return None
    device = choose_device(settings.device)
    check_devices(device, ranks)
    check_split(load_config(source), ranks)
    log.info("starting %d more ranks", ranks - 1)
    return Workers(settings, device)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank's model, ready to run; `fingerprint` is of its weights, some of which are freed."""

    model: PreTrainedModel
    fingerprint: str
    runner: ModelRunner
    num_blocks: int


def load_runner(settings: ServeSettings, meet: Callable[[], None]) -> Loaded:
    """Load this rank's part of the model and its pool.

    `meet` waits for the other ranks: from there on they run the same passes.
    Raises ConfigError as `load_serving` does.
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    check_kv_dtype(settings.kv_cache_dtype, device)
    check_quantization(settings.quantization, device)
    source = find_model(settings.model)
    model = load_model(source, device, dtype, ranks=settings.tensor_parallel_size)
    kv_dtype = choose_kv_dtype(settings.kv_cache_dtype, dtype)
    name = fingerprint(model, kv_dtype, settings.quantization)
    meet()
    return Loaded(model, name, *build_runner(model, settings))


def assemble(
    model: ServedModel,
    tokenizer: PreTrainedTokenizerFast,
    client: EngineClient,
    *,
    max_string_length: int | None = None,
) -> Serving:
    """A serving over a running engine; `max_string_length` as in `GrammarCompiler`.

    Raises ConfigError for a tokenizer that cannot be used.
    """
    pool = TokenizerPool(tokenizer)
    grammars = GrammarCompiler(
        tokenizer,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        syntax=pool.tool_format.syntax,
        max_string_length=max_string_length,
    )
    return Serving(model, pool, client, grammars)


def measure_host_tier(
    runner: Runner, loaded: Loaded, max_model_len: int, settings: ServeSettings
) -> tuple[int, int]:
    """The blocks of the host tier, and how many of them in a row are worth a swap."""
    host = loaded.runner.host
    if host is None:
        return 0, 1
    costs = measure(
        runner,
        host,
        num_blocks=loaded.num_blocks,
        block_size=settings.block_size,
        max_tokens=min(settings.max_batch_tokens, max_model_len),
    )
    if costs.min_swap is None:
        log.warning("no host tier, since nothing is gained by it: %s", costs)
        loaded.runner.drop_host()
        return 0, 1
    tokens = host.num_blocks * settings.block_size
    log.info("host tier of %d tokens, from %d blocks on: %s", tokens, costs.min_swap, costs)
    return host.num_blocks, costs.min_swap


def start_engine(
    runner: Runner,
    num_blocks: int,
    settings: ServeSettings,
    host_blocks: int = 0,
    min_swap: int = 1,
    sink: BlockSink | None = None,
) -> EngineClient:
    """Start an engine thread over a pool of `num_blocks` blocks, and `host_blocks` on the host.

    `sink` is told which blocks can be found.
    """
    cache = PrefixCache(
        num_blocks,
        settings.block_size,
        share=settings.prefix_caching,
        host_blocks=host_blocks,
        min_swap=min_swap,
        sink=sink,
    )
    scheduler = Scheduler(
        cache,
        max_batch_tokens=settings.max_batch_tokens,
        max_running=settings.max_running,
        cost=_step_cost(settings),
        max_draft=settings.speculative_tokens if runner.exact else 0,
    )
    mailboxes = Mailboxes()
    messenger = Messenger(mailboxes, lambda reason: engine.fail(reason))
    engine = Engine(runner, scheduler, messenger)
    engine.start()
    limits = Limits(
        max_requests=settings.max_running + settings.max_queue,
        max_tenant_requests=settings.max_requests_per_tenant,
        queue_timeout=settings.queue_timeout,
        request_timeout=settings.request_timeout,
    )
    return EngineClient(engine, mailboxes, limits)


def _step_cost(settings: ServeSettings) -> StepCost | None:
    bound = settings.max_step_time
    if bound is None and choose_device(settings.device).type == "cpu":
        bound = MAX_STEP_TIME
    return None if bound is None or isinf(bound) else StepCost(bound)


def _describe(loaded: Loaded, source: ModelSource, settings: ServeSettings) -> ServedModel:
    model = loaded.model
    config = model.config.get_text_config()
    # A tokenizer may know more tokens than the model has embeddings for.
    vocab_size = min(config.vocab_size, model.get_input_embeddings().num_embeddings)
    return ServedModel(
        names=tuple(settings.served_model_name) or (source.name,),
        max_model_len=max_model_len(model, settings),
        pool_tokens=loaded.num_blocks * settings.block_size,
        vocab_size=vocab_size,
        eos_token_ids=frozenset(t for t in eos_token_ids(model) if t < vocab_size),
        fingerprint=loaded.fingerprint,
        prefix_caching=settings.prefix_caching,
    )
