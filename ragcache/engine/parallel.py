"""Tensor parallelism: one model over several ranks, each with its heads of every layer.

transformers splits the weights as the model's `tp_plan` says (Megatron-LM, arXiv 1909.08053), and
adds the collectives to its layers. The ranks therefore run the same passes in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group
from transformers import PreTrainedConfig

from ragcache.errors import ConfigError, UnsupportedModel

TIMEOUT = timedelta(minutes=5)  # of one collective: it bounds how far ranks may drift apart
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

# Model types whose logits tests compare with the whole model's. Others with a plan may be right as
# well, but a layer that is missing in a plan shows in nothing but the answers.
SPLIT_MODELS = {
    "codegen",
    "cohere",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt_neox",
    "gptj",
    "granite",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
}


def check_split(config: PreTrainedConfig, ranks: int) -> None:
    """Refuse a model that cannot be split over `ranks`.

    Raises:
        ConfigError: naming the option and the reason.
    """
    if config.model_type not in SPLIT_MODELS:
        raise UnsupportedModel(
            f"tensor_parallel_size: model type {config.model_type} is not supported on several "
            f"ranks; these are: {', '.join(sorted(SPLIT_MODELS))}"
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or kv_heads % ranks:
        raise ConfigError(
            f"tensor_parallel_size: {ranks} does not divide the model's {heads} attention heads "
            f"and {kv_heads} KV heads"
        )


def check_devices(device: torch.device, ranks: int) -> None:
    """Refuse more ranks than there are GPUs, and a process that is a rank already.

    Raises:
        ConfigError: naming the option and the reason.
    """
    available = torch.cuda.device_count()
    if device.type == "cuda" and available < ranks:
        raise ConfigError(
            f"tensor_parallel_size: {ranks} ranks need a GPU each, and this torch sees {available}"
        )
    if device.type == "cpu" and available:  # transformers would take the GPUs all the same
        raise ConfigError(
            "tensor_parallel_size: on a machine with GPUs, ranks run on the CPU only with "
            "CUDA_VISIBLE_DEVICES= (empty) in the environment"
        )
    if dist.is_initialized():
        raise ConfigError("tensor_parallel_size: this process uses torch.distributed already")


@contextmanager
def joined(rank: int, ranks: int, store: Path, device: torch.device) -> Iterator[None]:
    """Be one of `ranks` processes that meet in the file `store`; returns when all are there.

    On a CPU they share the threads that torch would use.
    """
    try:
        _join(rank, ranks, store, device)
    except RuntimeError as error:
        raise ConfigError(f"tensor_parallel_size: the ranks cannot meet: {error}") from error
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(max(1, threads // ranks))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        abort()
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(rank: int, ranks: int, store: Path, device: torch.device) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    dist.init_process_group(
        BACKENDS[device.type],
        init_method=store.as_uri(),
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
        device_id=torch.device("cuda", rank) if device.type == "cuda" else None,
    )


def abort() -> None:
    """End this rank's collectives, so that none waits for a rank that is lost.

    Those of gloo end by themselves, when the other's sockets close.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        _abort_process_group()


def smallest(value: int, device: torch.device) -> int:
    """The smallest of what the ranks give."""
    least = torch.tensor(value, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)
