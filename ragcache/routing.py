"""How a router reads prompts: with the tokenizer and template of the replicas' model.

It loads no weights, and works where torch is not installed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ragcache.engine.source import find_model
from ragcache.gateway.route.reading import Encode
from ragcache.prompt.loader import load_tokenizer
from ragcache.prompt.tokenize import TokenizerPool
from ragcache.types import ChatPrompt

MAX_TOKENS = 1 << 20  # of a prompt; where a longer one goes makes no difference

log = logging.getLogger(__name__)


def load_encode(model: str | None) -> Encode:
    """Load the tokenizer of a model, named as for `find_model`.

    It takes seconds, so not on an event loop. Raises ConfigError.
    """
    source = find_model(model)
    log.info("loading the tokenizer of %s", source.name)
    tokenizer = TokenizerPool(load_tokenizer(source.location))

    async def encode(prompt: ChatPrompt | str, scope: str) -> Sequence[int]:
        if isinstance(prompt, str):
            return (await tokenizer.encode_text(prompt, MAX_TOKENS)).packed()
        return (await tokenizer.encode_chat(prompt, MAX_TOKENS, scope)).packed()

    return encode
