"""Where the model comes from and what its configuration says; no weight is loaded or unpacked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ragcache.engine.gguf import unpacked
from ragcache.engine.model import load_config
from ragcache.engine.source import ModelSource, find_model, gguf_file, gguf_name
from ragcache.engine.support import check_config
from ragcache.errors import ConfigError
from ragcache.prompt.loader import load_tokenizer

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """`origin` is embedded, GGUF, folder or hub; `ready` tells whether its weights lie at hand."""

    name: str
    origin: str
    location: str
    ready: bool


def locate(model: str | None) -> FoundModel:
    """What `serve` would load; raises ConfigError where there is nothing like it."""
    if file := gguf_file(model):
        folder = unpacked(file)
        origin = "embedded" if model is None else "GGUF"
        if folder.is_dir():
            return FoundModel(gguf_name(file), origin, str(folder), ready=True)
        return FoundModel(gguf_name(file), origin, str(file), ready=False)
    source = find_model(model)
    if not (folder := Path(source.location)).is_dir():
        cached = (try_to_load_from_cache(source.location, name) for name in WEIGHTS)
        ready = any(isinstance(path, str) for path in cached)
        return FoundModel(source.name, "hub", source.location, ready)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ConfigError(f"model: no weights in {folder}")
    return FoundModel(source.name, "folder", source.location, ready=True)


def read_config(found: FoundModel) -> PreTrainedConfig:
    """Its configuration, with its tokenizer checked where that is quick.

    Raises:
        ConfigError: where they cannot be read, or the model is not supported.
    """
    if found.origin in ("embedded", "GGUF") and not found.ready:
        return _gguf_config(Path(found.location))
    config = load_config(ModelSource(found.name, found.location))
    load_tokenizer(found.location)
    return config


def without_weights(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model as shapes only; raises ConfigError where transformers has no such class."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
    return model


def _gguf_config(file: Path) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot read {file}: {error}") from error
    check_config(config)
    return config
