"""The invariants of pool, tree and rows, each with the sentence that names it when it breaks.

They raise AssertionError by hand, since `assert` statements are gone under `python -O`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import chain

from ragcache.prefix.blocks import Block, BlockPool, Node
from ragcache.prefix.names import block_keys
from ragcache.prefix.radix import RadixIndex, walk
from ragcache.prefix.rows import Row


def check(
    pool: BlockPool,
    index: RadixIndex,
    rows: Collection[Row],
    copies: Collection[tuple[Block, Block]],
    block_size: int,
) -> None:
    """Verify everything; raises AssertionError. Linear in the pool and in the rows' tokens."""
    _check_owners(pool, rows, copies)
    _check_queue(pool)
    _check_tree(pool, index, width=block_size * 4)
    for row in rows:
        _check_row(pool, index, row, block_size)


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)


def _check_owners(
    pool: BlockPool, rows: Iterable[Row], copies: Iterable[tuple[Block, Block]]
) -> None:
    """Every reference belongs to a row's table entry or to an end of a copy."""
    copied = Counter(block.id for block in chain.from_iterable(copies))
    owners = copied + Counter(chain.from_iterable(row.table for row in rows))
    for block in pool.blocks:
        owned, copying = owners.get(block.id, 0), copied.get(block.id, 0)
        if block.ref_count != owned or block.copies != copying:
            raise AssertionError(
                f"block {block.id} has {owned} owners, {copying} of them copies, "
                f"but counts {block.ref_count} and {block.copies}"
            )


def _check_queue(pool: BlockPool) -> None:
    """The queue holds the blocks without owner, each once, children before their parents."""
    passed: set[Block] = set()
    for block in pool.queue():
        _require(block not in passed, f"block {block.id} is twice in the queue")
        _require(block.ref_count == 0, f"block {block.id} is held, yet in the queue")
        _require(block.next.prev is block, f"block {block.id} is not linked back to")
        _require(
            passed.issuperset(block.children.values()),
            f"block {block.id} would be evicted before its children",
        )
        passed.add(block)
    cached = sum(block.parent is not None for block in passed)
    held = sum(block.ref_count > 0 for block in pool.blocks)
    _require(pool.cached == cached, f"{cached} blocks are cached, {pool.cached} counted")
    _require(pool.available == len(passed), f"{len(passed)} queued, {pool.available} counted")
    _require(
        pool.available + held == len(pool.blocks),
        f"{pool.available} free or cached + {held} held are not {len(pool.blocks)} blocks",
    )


def _check_tree(pool: BlockPool, index: RadixIndex, width: int) -> None:
    """Tree and blocks agree in both directions, and no namespace is empty."""
    found: set[Block] = set()
    for namespace, root in index.roots.items():
        _require(root.key == namespace, "a root has the key of another namespace")
        _require(bool(root.children), "an empty namespace has kept its root")
        for block in walk(root):
            _require(block not in found, f"block {block.id} is twice in the tree")
            _require(len(block.key) == width, f"block {block.id} has a key of another size")
            _check_link(block)
            found.add(block)
    for block in pool.blocks:
        _require(
            (block.parent is not None) == (block in found),
            f"block {block.id} is published but not in the tree, or the reverse",
        )
        _require(
            block in found or not (block.key or block.name or block.children),
            f"block {block.id} is not published but keeps a key, a name or children",
        )


def _check_link(block: Block) -> None:
    linked = block.parent is not None and block.parent.children.get(block.key) is block
    _require(linked, f"block {block.id} is not the child its parent knows")


def _check_row(pool: BlockPool, index: RadixIndex, row: Row, block_size: int) -> None:
    """The row covers its tokens, and its committed whole blocks spell them from the root."""
    covers = -(-row.num_tokens // block_size) == len(row.table)
    _require(covers, f"{len(row.table)} blocks do not cover {row.num_tokens} tokens")
    whole = row.num_computed // block_size
    if not row.publishes or not whole:
        return
    parent: Node | None = index.roots.get(row.namespace)
    keys = block_keys(row.tokens, 0, whole, block_size)
    for block_id, key in zip(row.table, keys, strict=False):
        block = pool.blocks[block_id]
        _require(
            block.parent is not None and block.parent is parent and block.key == key,
            f"block {block.id} is not what its row's tokens say",
        )
        parent = block
