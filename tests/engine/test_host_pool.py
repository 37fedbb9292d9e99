"""Host pools move whole blocks, whatever is in them."""

from contextlib import nullcontext

import pytest
import torch

from ragcache.engine import pinned_pool
from ragcache.engine.host_pool import PlainHostPool, host_pool
from ragcache.errors import ConfigError

CUDA = torch.cuda.is_available()
BLOCKS = 9


class InOrder:
    """Where there is no GPU there are no streams: everything runs at once, in the same order."""

    def __init__(self, device):
        self.after_compute = nullcontext
        self.before_compute = nullcontext


@pytest.fixture(params=["plain", "pinned"])
def make(request, monkeypatch):
    """Makes a pool of blocks with bits of all kinds, and a host pool for it.

    The one for a GPU runs in Triton's interpreter, if there is no GPU.
    """
    device = "cuda" if request.param == "pinned" and CUDA else "cpu"
    kind = PlainHostPool if request.param == "plain" else pinned_pool.PinnedHostPool
    if request.param == "pinned" and not CUDA:
        monkeypatch.setattr(pinned_pool, "SideStream", InOrder)
        monkeypatch.setattr(pinned_pool, "pin", lambda tensor: None)
        monkeypatch.setattr(pinned_pool, "unpin", lambda tensor: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def make(num_blocks):
        torch.manual_seed(0)
        tensors = [
            torch.randint(0, 256, (BLOCKS, 4, 2, 16), dtype=torch.uint8, device=device).view(dtype)
            for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)
        ]
        tensors.append(torch.randn(BLOCKS, 4, 2, device=device))  # scales: blocks of another size
        tensors.append(torch.randint(0, 9, (BLOCKS, 3), dtype=torch.int8, device=device))
        return tensors, kind(tensors, num_blocks)

    return make


def snapshot(tensors):
    return [tensor.clone().view(torch.uint8) for tensor in tensors]


def block(tensors, index):
    return [tensor[index].tolist() for tensor in tensors]


def test_blocks_come_back_with_every_bit(make):
    tensors, host = make(6)
    before = snapshot(tensors)
    host.swap_out([(7, 0), (2, 5), (4, 3)])
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(255)
    host.swap_in([(3, 1), (0, 8), (5, 2)])
    after = snapshot(tensors)
    for source, target in ((4, 1), (7, 8), (2, 2)):
        assert block(after, target) == block(before, source)
    for untouched in (0, 3, 4, 5, 6, 7):
        assert all((tensor[untouched] == 255).all() for tensor in after)
    host.close()


def test_what_goes_out_can_come_in_within_the_same_step(make):
    tensors, host = make(1)
    before = snapshot(tensors)
    host.swap_out([(3, 0)])
    host.swap_in([(0, 5)])
    assert block(snapshot(tensors), 5) == block(before, 3)
    host.swap_out([(4, 0)])  # used anew
    host.swap_in([(0, 5)])
    assert block(snapshot(tensors), 5) == block(before, 4)


def test_nothing_to_move_is_fine(make):
    tensors, host = make(2)
    before = snapshot(tensors)
    host.swap_out([])
    host.swap_in([])
    assert block(snapshot(tensors), slice(None)) == block(before, slice(None))


def test_more_blocks_than_the_staging_holds_move_in_turns(make, monkeypatch):
    monkeypatch.setattr(pinned_pool, "STAGING", 3 * (3 * 3 * 128))  # three blocks of the widest
    tensors, host = make(BLOCKS)
    before = snapshot(tensors)
    host.swap_out([(i, (i + 4) % BLOCKS) for i in range(BLOCKS)])
    for tensor in tensors:
        tensor.zero_()
    host.swap_in([((i + 4) % BLOCKS, BLOCKS - 1 - i) for i in range(BLOCKS)])
    assert block(snapshot(tensors), slice(None)) == [each.flip(0).tolist() for each in before]


def test_a_pool_has_as_many_blocks_as_fit(make):
    tensors, _ = make(1)
    size = sum(tensor[0].nbytes for tensor in tensors)
    assert host_pool([tensor.cpu() for tensor in tensors], 5 * size + size // 2).num_blocks == 5


def test_memory_for_less_than_one_block_is_refused():
    with pytest.raises(
        ConfigError, match=r"host_cache_memory: 63 bytes hold no block; .* 64 bytes"
    ):
        host_pool([torch.zeros(4, 8), torch.zeros(4, 8)], 63)


def test_memory_that_cannot_be_had_is_refused():
    with pytest.raises(ConfigError, match=r"host_cache_memory: .* cannot be had"):
        host_pool([torch.zeros(4, 8)], 2**62)
