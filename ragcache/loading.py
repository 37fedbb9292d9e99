"""From settings to a running `Serving`: model, pool, engine thread, tokenizers."""

from __future__ import annotations

import logging

from ragcache_kernels import best_backend, get_backend
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ragcache.config import ServeSettings
from ragcache.engine.bridge import EngineClient, Mailboxes
from ragcache.engine.loop import Engine
from ragcache.engine.model import (
    ModelSource,
    choose_device,
    choose_dtype,
    eos_token_ids,
    find_model,
    fingerprint,
    load_model,
)
from ragcache.engine.pool import KVPool, bytes_per_block, pool_blocks
from ragcache.engine.runner import ModelRunner, Runner
from ragcache.engine.scheduler import Scheduler
from ragcache.engine.support import prepare_model
from ragcache.errors import ConfigError
from ragcache.prefix.cache import PrefixCache
from ragcache.prompt.grammar import GrammarCompiler
from ragcache.prompt.loader import load_tokenizer
from ragcache.prompt.tokenize import TokenizerPool
from ragcache.serving import ServedModel, Serving

log = logging.getLogger(__name__)

SMALL_MODELS_STRINGS = 200  # characters; the embedded model would go on until its tokens run out


def load_serving(settings: ServeSettings) -> Serving:
    """Load everything and start the engine; takes seconds to minutes, so not on an event loop.

    Raises:
        ConfigError: naming the option that cannot be honoured.
    """
    source = find_model(settings.model)
    device = choose_device(settings.device)
    model = load_model(source, device, choose_dtype(settings.dtype, device))
    runner, num_blocks = build_runner(model, settings)
    log.info("loading the tokenizer of %s", source.name)
    tokenizer = load_tokenizer(source.location)
    served = _describe(model, source, settings, num_blocks)
    log.info("loaded %s, KV pool of %d tokens", served.names[0], served.pool_tokens)
    is_small = settings.model is None
    strings = settings.max_string_length or (SMALL_MODELS_STRINGS if is_small else None)
    client = start_engine(runner, num_blocks, settings)
    return assemble(served, tokenizer, client, max_string_length=strings)


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


def build_runner(model: PreTrainedModel, settings: ServeSettings) -> tuple[ModelRunner, int]:
    """Switch a model to paged attention and give it a KV pool; also returns its blocks."""
    layers = prepare_model(model)
    size = settings.block_size
    num_blocks = settings.kv_cache_blocks or pool_blocks(
        bytes_per_block(layers, size, model.dtype), settings.kv_cache_memory, model.device
    )
    try:
        pool = KVPool(layers, num_blocks, size, model.dtype, model.device)
    except RuntimeError as error:
        raise ConfigError(f"the KV pool of {num_blocks} blocks cannot be had: {error}") from error
    dims = (max(layer.key_dim, layer.value_dim) for layer in layers)
    backend = best_backend(model.device, model.dtype, dims)
    log.info("attention runs on %s", backend)
    return ModelRunner(model, pool, get_backend(backend)), num_blocks


def start_engine(runner: Runner, num_blocks: int, settings: ServeSettings) -> EngineClient:
    """Start an engine thread over a pool of `num_blocks` blocks."""
    cache = PrefixCache(num_blocks, settings.block_size, share=settings.prefix_caching)
    scheduler = Scheduler(
        cache, max_batch_tokens=settings.max_batch_tokens, max_running=settings.max_running
    )
    mailboxes = Mailboxes()
    engine = Engine(runner, scheduler, mailboxes)
    engine.start()
    return EngineClient(engine, mailboxes, settings.max_running + settings.max_queue)


def _describe(
    model: PreTrainedModel, source: ModelSource, settings: ServeSettings, num_blocks: int
) -> ServedModel:
    config = model.config.get_text_config()
    # A tokenizer may know more tokens than the model has embeddings for.
    vocab_size = min(config.vocab_size, model.get_input_embeddings().num_embeddings)
    limit = getattr(config, "max_position_embeddings", None)
    wanted = settings.max_model_len or limit
    if wanted is None:
        raise ConfigError("max_model_len: the model's configuration does not tell; please set it")
    if limit is not None and wanted > limit:
        raise ConfigError(f"max_model_len: {wanted} exceeds the model's {limit} positions")
    return ServedModel(
        names=tuple(settings.served_model_name) or (source.name,),
        max_model_len=wanted,
        pool_tokens=num_blocks * settings.block_size,
        vocab_size=vocab_size,
        eos_token_ids=frozenset(t for t in eos_token_ids(model) if t < vocab_size),
        fingerprint=fingerprint(model),
        prefix_caching=settings.prefix_caching,
    )
