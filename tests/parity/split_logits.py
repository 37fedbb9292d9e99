"""One of two ranks: writes the logits that each model of a folder gives when it is split.

`python split_logits.py RANK FOLDER`; the prompt is fed in two chunks, and its second block is
copied before the second.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ragcache_kernels.interface import StepLayout
from transformers.utils.logging import disable_progress_bar

from ragcache.config import ServeSettings
from ragcache.engine.batch import StepBatch
from ragcache.engine.parallel import joined, smallest
from ragcache.loading import load_runner

BLOCK = 4
COPY = (5, 3)
SHARES = {0: [7, 5], 8: [7, 3, 0, 2]}  # block tables by the chunk's first position


def batch(prompt: list[int], start: int, stop: int) -> StepBatch:
    table = torch.tensor(SHARES[start])
    positions = torch.arange(start, stop)
    layout = StepLayout(
        cu_q=torch.tensor([0, stop - start], dtype=torch.int32),
        kv_len=torch.tensor([stop], dtype=torch.int32),
        block_table=table.int()[None],
        slot_mapping=table[positions // BLOCK] * BLOCK + positions % BLOCK,
        block_size=BLOCK,
    )
    return StepBatch(
        input_ids=torch.tensor([prompt[start:stop]]),
        position_ids=positions[None],
        last_idx=torch.arange(stop - start),
        layout=layout,
        swap_outs=[],
        swap_ins=[],
        copies=[COPY] if start else [],
    )


def main(rank: int, folder: Path) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    disable_progress_bar()
    prompt: list[int] = torch.load(folder / "prompt.pt").tolist()
    cpu = torch.device("cpu")
    with joined(rank, 2, folder / "store", cpu):
        assert smallest(9 - rank, cpu) == 8
        for model in sorted(folder.glob("*/")):
            settings = ServeSettings(
                model=str(model),
                device="cpu",
                dtype="float32",
                tensor_parallel_size=2,
                kv_cache_blocks=8,
                block_size=BLOCK,
            )
            runner = load_runner(settings, meet=dist.barrier).runner
            logits = [runner.run(batch(prompt, 0, 8)), runner.run(batch(prompt, 8, len(prompt)))]
            if rank == 0:
                torch.save(torch.cat(logits), model / "split.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
