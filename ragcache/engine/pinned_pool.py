"""The host pool of a GPU: pinned memory, and copies beside the computation.

A block is spread over the tensors of all layers. One kernel gathers many blocks into staging
memory on the device, where each of them lies in one piece, and is then one copy to the host. More
blocks than the staging holds move through it in turns: a step may swap any number of them, which
takes time but no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from ragcache_kernels.triton.blocks import empty_staging, gather_blocks, scatter_blocks
from torch import Tensor

from ragcache.engine.pool import STAGING, Pairs


class SideStream:
    """A stream of copies beside the stream that computes; the host waits for neither."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """What is queued within comes after all that has been queued to compute."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def before_compute(self) -> None:
        """What will be queued to compute comes after all that has been queued here."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class PinnedHostPool:
    """See `HostPool`. The order on the side stream is that of the swaps, so the copy that reads a
    host block comes after the one that writes it.
    """

    def __init__(self, tensors: Sequence[Tensor], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        side = SideStream(tensors[0].device)
        by_size: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            by_size.setdefault(tensor[0].nbytes, []).append(tensor)
        staging = STAGING // len(by_size)
        self._parts = [PinnedPart(each, num_blocks, side, staging) for each in by_size.values()]

    def swap_out(self, pairs: Pairs) -> None:
        """See `HostPool`."""
        for part in self._parts:
            part.swap_out(pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """See `HostPool`."""
        for part in self._parts:
            part.swap_in(pairs)

    def close(self) -> None:
        """See `HostPool`."""
        for part in self._parts:
            part.close()


class PinnedPart:
    """Host memory for the tensors whose blocks are of one size, and `staging` bytes for them."""

    def __init__(
        self, caches: Sequence[Tensor], num_blocks: int, side: SideStream, staging: int
    ) -> None:
        self._caches = caches
        self._side = side
        block_bytes = len(caches) * caches[0][0].nbytes
        staged = min(num_blocks, max(1, staging // block_bytes))
        self._staging = empty_staging(caches, staged)
        self._blocks = self._staging.new_empty(num_blocks, *self._staging.shape[1:], device="cpu")
        pin(self._blocks)

    def swap_out(self, pairs: Pairs) -> None:
        """See `HostPool`."""
        for sources, targets, staging in self._staged(pairs):
            self._side.before_compute()  # or the staging might still be read
            gather_blocks(self._caches, sources, staging)
            with self._side.after_compute():
                for block, target in zip(staging, targets, strict=True):
                    self._blocks[target].copy_(block, non_blocking=True)

    def swap_in(self, pairs: Pairs) -> None:
        """See `HostPool`."""
        for sources, targets, staging in self._staged(pairs):
            with self._side.after_compute():  # or the staging might still be read
                for block, source in zip(staging, sources, strict=True):
                    block.copy_(self._blocks[source], non_blocking=True)
            self._side.before_compute()
            scatter_blocks(self._caches, targets, staging)

    def close(self) -> None:
        """See `HostPool`."""
        torch.cuda.synchronize(self._staging.device)
        unpin(self._blocks)

    def _staged(self, pairs: Pairs) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Tensor]]:
        """Sources and targets, as many as fit into the staging at a time, and their part of it."""
        for start in range(0, len(pairs), len(self._staging)):
            some = pairs[start : start + len(self._staging)]
            sources, targets = zip(*some, strict=True)
            yield sources, targets, self._staging[: len(some)]


def pin(tensor: Tensor) -> None:
    """Let the GPU copy from and to this memory by itself, until `unpin`.

    Torch's own pinned memory would be rounded up to a power of two.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))


def unpin(tensor: Tensor) -> None:
    """Undo `pin`, before the memory is given back."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostUnregister(tensor.data_ptr()))
