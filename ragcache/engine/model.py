"""From where a model is to a loaded one."""

from __future__ import annotations

import hashlib
import logging

import torch
from ragcache_kernels.native.library import NativeUnavailable, chosen_tier
from ragcache_kernels.quantise import FLOAT8_CAPABILITY, quantised_dtypes
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from ragcache.engine.source import ModelSource
from ragcache.engine.support import check_config
from ragcache.errors import ConfigError

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def choose_device(device: str) -> torch.device:
    """`auto`, `cpu` or `cuda`; raises ConfigError for `cuda` without CUDA."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("device: cuda was asked for, but this torch sees no CUDA device")
    return torch.device("cuda" if available and device != "cpu" else "cpu")


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The named dtype; `auto` is bfloat16 where the hardware multiplies it, else float32."""
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def choose_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Of the pool of a model in `dtype`, where `auto` means the same."""
    return KV_DTYPES.get(name, dtype)


def check_kv_dtype(name: str, device: torch.device) -> None:
    """Raise ConfigError for fp8 on a GPU that knows no float8."""
    if name == "fp8" and torch.float8_e4m3fn not in quantised_dtypes(device):
        needed, found = FLOAT8_CAPABILITY, torch.cuda.get_device_capability(device)
        raise ConfigError(
            "kv_cache_dtype: fp8 takes a GPU of compute capability {}.{} or later, and this one "
            "has {}.{}; int8 takes the same memory on any".format(*needed, *found)
        )


def check_quantization(name: str | None, device: torch.device) -> None:
    """Raise ConfigError where weights cannot be quantised, whatever the model is."""
    if name is None:
        return
    if device.type != "cpu":
        raise ConfigError(f"quantization: {name} is for CPUs; please set --device cpu, or leave it")
    try:
        chosen_tier()
    except NativeUnavailable as error:
        raise ConfigError(f"quantization: {name} takes the C kernels: {error}") from error


def check_quantized(name: str | None, model: PreTrainedModel, backend: str, fused: int) -> None:
    """Raise ConfigError where not all of a model's layers run fused on the C kernels."""
    if name is None:
        return
    if backend != "native":
        raise ConfigError(f"quantization: the C kernels do it, and attention runs on {backend}")
    layers = model.config.get_text_config().num_hidden_layers
    if fused < layers:
        count = f"{fused} of {layers}"
        kind = model.config.model_type
        raise ConfigError(f"quantization: it takes fused layers; of {kind}, {count} are")


def load_config(source: ModelSource) -> PreTrainedConfig:
    """The configuration of a model that may be supported.

    Raises:
        ConfigError: when it is not, or when transformers cannot read it.
    """
    try:
        config = AutoConfig.from_pretrained(source.location)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot load {source.name}: {error}") from error
    check_config(config)
    return config


def load_model(
    source: ModelSource, device: torch.device, dtype: torch.dtype, ranks: int = 1
) -> PreTrainedModel:
    """Load the weights for inference; with several ranks, this one's share (see `parallel`).

    Raises:
        ConfigError: when transformers cannot load the model; the message is its own.
    """
    config = load_config(source)
    log.info("loading %s (%s) as %s on %s", source.name, config.model_type, dtype, device)
    split = DistributedConfig(tp_size=ranks) if ranks > 1 else None
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.location, dtype=dtype, distributed_config=split
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot load {source.name}: {error}") from error
    return model.to(device).eval()


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """The token ids with which the model itself ends an answer."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def fingerprint(
    model: PreTrainedModel, kv_dtype: torch.dtype, quantization: str | None = None
) -> str:
    """A digest of configuration, dtypes and a sample of every weight, equal in every process.

    KV of one model or dtype must never be taken for another's; the name alone does not tell. A
    model that is split over ranks has a name of its own for each split: the shapes are those of
    one rank.
    """
    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    digest.update(str(kv_dtype).encode())
    if quantization is not None:
        digest.update(f"weights in {quantization}".encode())
    for name, parameter in model.named_parameters():
        weight = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        sample = weight.detach().flatten()[:64].float().cpu().numpy().tobytes()
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode() + sample)
    return digest.hexdigest()
