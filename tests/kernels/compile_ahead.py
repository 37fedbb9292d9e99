"""Compiles the GPU kernels as they are shipped, without a GPU; prints what each takes, as JSON.

A program of its own: kernels that were decorated for the interpreter cannot be compiled.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from ragcache_kernels.triton.activation import CHUNK as GATE_CHUNK
from ragcache_kernels.triton.activation import gate_rows
from ragcache_kernels.triton.attention import attend_tiles, merge_partials
from ragcache_kernels.triton.blocks import CHUNK, move_blocks
from ragcache_kernels.triton.configs import Case, Phase, choose
from ragcache_kernels.triton.layer_ops import norm_warps
from ragcache_kernels.triton.mask import WORDS, mask_words
from ragcache_kernels.triton.norm import norm_rows
from ragcache_kernels.triton.rope import rotate_tokens
from ragcache_kernels.triton.write import write_tokens
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
FLOATS = dict.fromkeys(("scale", "softcap", "eps", "query_eps", "key_eps"), "fp32")
POINTERS = {
    "table_ptr": "*i32",
    "tiles_ptr": "*i32",
    "count_ptr": "*i32",
    "tokens_ptr": "*i32",
    "positions_ptr": "*i32",
    "ends_ptr": "*i32",
    "order_ptr": "*i32",
    "slots_ptr": "*i32",
    "caches_ptr": "*i64",
    "ids_ptr": "*i64",
    "staging_ptr": "*i64",
    "packed_ptr": "*i32",
    "lse_ptr": "*fp32",
    "logits_ptr": "*fp32",
    "partial_ptr": "*fp32",
    "k_scale_ptr": "*fp32",
    "v_scale_ptr": "*fp32",
}
BF16 = "torch.bfloat16"
CACHES = {BF16: "*bf16", "torch.int8": "*i8", "torch.float8_e4m3fn": "*fp8e4nv"}
PLAIN = {"num_warps": 4, "num_stages": 3}
NOT_DIVISIBLE = {"window", "packed_row", "heads", "count", *FLOATS}


def compiled(
    kernel: Any, arch: int, options: Mapping[str, Any], dtype: str = BF16, **constants: Any
) -> dict[str, int]:
    """Registers, bytes of shared memory, spilling instructions, asynchronous loads by width.

    `dtype` is that of the cache.
    """
    names = list(inspect.signature(kernel.fn).parameters)
    pointers = POINTERS | {"k_ptr": CACHES[dtype], "v_ptr": CACHES[dtype]}
    if dtype == BF16:
        constants |= {name: None for name in names if name.endswith("scale_ptr")}
    if kernel is attend_tiles:
        pointers["out_ptr"] = "*fp32"
    signature = {name: _type(name, pointers, constants) for name in names}
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in constants and name not in NOT_DIVISIBLE
    }
    source = ASTSource(kernel, signature, constants, divisible)
    target = GPUTarget("cuda", arch, 32)
    result = triton.compile(source, target=target, options=options)
    return {"shared": result.metadata.shared, **_resources(result.asm["cubin"])}


def _type(name: str, pointers: dict[str, str], constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name.endswith("_ptr"):
        return pointers.get(name, "*bf16")
    return FLOATS.get(name, "i32")


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _dump("-res-usage", file.name)
        code = _dump("-sass", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None
    return {
        "registers": int(registers[1]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "wide_loads": len(re.findall(r"LDGSTS\S*\.128", code)),
        "half_wide_loads": len(re.findall(r"LDGSTS\S*\.64", code)),
        "wide_row_loads": len(re.findall(r"\bLDG\S*\.128\b", code)),
        "narrow_loads": len(re.findall(r"\bLDG\S*\.(?:U8|S8|U16)\b", code)),
    }


def _dump(option: str, path: str) -> str:
    return subprocess.run(
        [CUOBJDUMP, option, path], capture_output=True, text=True, check=True
    ).stdout


def attention(
    arch: int, phase: Phase, dim: int, group: int, dtype: str = BF16, **options: bool
) -> dict[str, int]:
    """The attention kernel in the configuration that the table has for it."""
    config = choose(Case(arch, dim, group, dtype, phase))
    flags = {"SOFTCAP": False, "WINDOW": False, "PERSISTENT": False, "UPCAST": False} | options
    padded = max(16, triton.next_power_of_2(dim))
    return compiled(
        attend_tiles,
        arch,
        config.options,
        dtype,
        GROUP=group,
        DIM=dim,
        VALUE_DIM=dim,
        PADDED_DIM=padded,
        PADDED_VALUE_DIM=padded,
        BLOCK_SIZE=16,
        BM=max(config.bm, triton.next_power_of_2(group)),
        BN=config.bn,
        **flags,
    )


def layers(arch: int) -> dict[str, dict[str, int]]:
    """The kernels of a layer beside attention, for the widest of the common models."""
    found = {}
    for size in (576, 4096, 16384):
        padded = triton.next_power_of_2(size)
        options = PLAIN | {"num_warps": norm_warps(padded)}
        sizes = {"SIZE": size, "PADDED_SIZE": padded}
        found[f"norm {size}"] = compiled(norm_rows, arch, options, **sizes)
    for gelu in (False, True):
        found[f"gate {gelu}"] = compiled(
            gate_rows, arch, PLAIN, SIZE=14336, GELU=gelu, CHUNK=GATE_CHUNK
        )
    return found


def write(arch: int, dtype: str) -> dict[str, int]:
    """The kernel that stores keys and values."""
    sizes = {"DIM": 128, "VALUE_DIM": 128, "PADDED_DIM": 128, "PADDED_VALUE_DIM": 128}
    heads = {"HEADS": 8, "PADDED_HEADS": 8, "BLOCK_SIZE": 16}
    return compiled(write_tokens, arch, PLAIN, dtype, **sizes, **heads)


def rotate(arch: int, dtype: str, dim: int, kv_heads: int, *, normed: bool) -> dict[str, int]:
    """The kernel that rotates and stores."""
    norms = {} if normed else {"query_norm_ptr": None, "key_norm_ptr": None}
    return compiled(
        rotate_tokens,
        arch,
        PLAIN,
        dtype,
        HEADS=kv_heads,
        DIM=dim,
        ROTARY=dim,
        PADDED_HEADS=triton.next_power_of_2(kv_heads),
        PADDED_DIM=triton.next_power_of_2(dim),
        BLOCK_SIZE=16,
        **norms,
    )


def eight_bits(arch: int, dtype: str) -> dict[str, dict[str, int]]:
    """The kernels for which it matters that a cache is quantised."""
    found = {}
    for dim, group in ((128, 8), (256, 2)):
        for phase in Phase:
            kind, _, recorded = phase.partition(" ")
            name = f"{kind}8 {dim}/{group} {recorded}"
            persistent = {"PERSISTENT": bool(recorded)}
            found[name] = attention(arch, phase, dim, group, dtype, **persistent)
    found["write8"] = write(arch, dtype)
    found["rotate8 128/8"] = rotate(arch, dtype, 128, 8, normed=True)
    return found


def sixteen_bits(arch: int) -> dict[str, dict[str, int]]:
    """All kernels."""
    found = {}
    for dim, group in ((64, 3), (80, 1), (128, 4), (128, 8), (128, 16), (256, 2)):
        name = f"{dim}/{group}"
        found[f"narrow {name}"] = attention(arch, Phase.NARROW, dim, group)
        found[f"narrow {name} recorded"] = attention(
            arch, Phase.NARROW_RECORDED, dim, group, PERSISTENT=True
        )
        found[f"wide {name}"] = attention(arch, Phase.WIDE, dim, group)
        found[f"wide {name} recorded"] = attention(
            arch, Phase.WIDE_RECORDED, dim, group, PERSISTENT=True
        )
    for recorded, phase in ((False, Phase.WIDE), (True, Phase.WIDE_RECORDED)):
        capped = {"SOFTCAP": True, "WINDOW": True, "PERSISTENT": recorded}
        found[f"wide 256/2 capped {phase}"] = attention(arch, phase, 256, 2, **capped)
        found[f"wide 128/48 {phase}"] = attention(arch, phase, 128, 48, PERSISTENT=recorded)
    found["merge"] = compiled(
        merge_partials, arch, PLAIN, BH=8, SINKS=True, VALUE_DIM=128, PADDED_VALUE_DIM=128
    )
    found["write"] = write(arch, BF16)
    for dim, kv_heads, normed in ((64, 3, False), (96, 32, True), (128, 8, True), (256, 4, True)):
        found[f"rotate {dim}/{kv_heads}"] = rotate(arch, BF16, dim, kv_heads, normed=normed)
    found["move"] = compiled(move_blocks, arch, PLAIN, GATHER=True, CHUNK=CHUNK)
    found["mask"] = compiled(mask_words, arch, PLAIN, WORDS=WORDS)
    return found | layers(arch)


def main() -> None:
    """The kernels for an architecture and a dtype of the cache."""
    arch, dtype = int(sys.argv[1]), sys.argv[2]
    print(json.dumps(sixteen_bits(arch) if dtype == BF16 else eight_bits(arch, dtype)))


if __name__ == "__main__":
    main()
