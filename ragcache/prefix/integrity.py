"""The invariants of pools, tree, retention and rows.

Each comes with the sentence that names it when it breaks. They raise AssertionError by hand,
since `assert` statements are gone under `python -O`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from itertools import chain

from ragcache.prefix.blocks import Block, BlockPool, Node
from ragcache.prefix.copies import Copies
from ragcache.prefix.ends import Ends
from ragcache.prefix.names import block_keys, block_name
from ragcache.prefix.radix import walk
from ragcache.prefix.retention import Retention
from ragcache.prefix.rows import Row
from ragcache.prefix.store import BlockStore


def check(store: BlockStore, rows: Collection[Row], copies: Copies) -> None:
    """Verify everything; raises AssertionError. Linear in the pools and in the rows' tokens."""
    swaps = [store.host.swap_outs, store.host.swap_ins]
    copied = [
        block
        for each in (copies, *swaps)
        for block in chain.from_iterable(each.waiting + each.running)
    ]
    _check_owners(store.pool, rows, [block for block in copied if not block.on_host])
    _check_owners(store.host.pool, [], [block for block in copied if block.on_host])
    for pool in (store.pool, store.host.pool):
        _check_queue(pool)
    _check_tree(store, width=store.block_size * 4)
    _check_retention(store.pool, store.retention)
    for row in rows:
        _check_row(store, row)


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)


def _check_owners(pool: BlockPool, rows: Iterable[Row], ends: Iterable[Block]) -> None:
    """Every reference belongs to a row's table entry or to an end of a copy."""
    copied = Counter(block.id for block in ends)
    owners = copied + Counter(chain.from_iterable(row.table for row in rows))
    for block in pool.blocks:
        owned, copying = owners.get(block.id, 0), copied.get(block.id, 0)
        if block.ref_count != owned or block.copies != copying:
            raise AssertionError(
                f"{block} has {owned} owners, {copying} of them copies, "
                f"but counts {block.ref_count} and {block.copies}"
            )


def _check_queue(pool: BlockPool) -> None:
    """The queue holds the blocks without owner, each once, children before parents.

    Retained ones come last.
    """
    passed: set[Block] = set()
    retained_passed = False
    for block in pool.queue():
        _require(block not in passed, f"{block} is twice in the queue")
        _require(block.ref_count == 0, f"{block} is held, yet in the queue")
        _require(block.next.prev is block, f"{block} is not linked back to")
        _require(
            passed.issuperset(_children(block, on_host=block.on_host)),
            f"{block} would be evicted before its children",
        )
        retained_passed |= block.keep_ttl > 0
        _require(
            (block.keep_ttl > 0) == retained_passed,
            f"{block} is in the wrong part of the queue",
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


def _children(block: Block, on_host: bool) -> list[Block]:
    return [child for child in block.children.values() if child.on_host == on_host]


def _check_tree(store: BlockStore, width: int) -> None:
    """Tree and blocks agree in both directions, and no namespace is empty.

    Below host blocks there are only host blocks.
    """
    found: set[Block] = set()
    for namespace, root in store.index.roots.items():
        _require(root.key == namespace, "a root has the key of another namespace")
        _require(bool(root.children), "an empty namespace has kept its root")
        for block in walk(root):
            _require(block not in found, f"{block} is twice in the tree")
            _require(len(block.key) == width, f"{block} has a key of another size")
            _check_link(block)
            _check_hits(block)
            _require(
                not (block.on_host and _children(block, on_host=False)),
                f"{block} has a child on the device",
            )
            found.add(block)
    for block in chain(store.pool.blocks, store.host.pool.blocks):
        _require(
            (block.parent is not None) == (block in found),
            f"{block} is published but not in the tree, or the reverse",
        )
        _require(
            block in found or not (block.key or block.name or block.children or block.hits),
            f"{block} is not published but keeps a key, a name, children or hits",
        )


def _check_link(block: Block) -> None:
    parent = block.parent or Node()
    linked = parent.children.get(block.key) is block
    _require(linked, f"{block} is not the child its parent knows")
    named = not block.name or block.name == block_name(parent.name, block.key)
    _require(named, f"{block} has the name of another")


def _check_hits(block: Block) -> None:
    """Whoever reads a block reads its parents too."""
    if isinstance(block.parent, Block):
        _require(block.hits <= block.parent.hits, f"{block} was hit more often than its parent")


def _check_retention(pool: BlockPool, retention: Retention) -> None:
    """Retention covers whole prefixes, within its cap."""
    retained = [block for block in pool.blocks if block.keep_ttl]
    _require(retention.count == len(retained), f"{retention.count} blocks are counted as retained")
    _require(len(retained) <= retention.cap, f"{len(retained)} blocks are retained")
    children = Counter(block.parent for block in retained)
    for block in pool.blocks:
        count = block.retained_children
        _require(count == children[block], f"{block} counts {count} retained children")
    for block in retained:
        _require(block.parent is not None, f"{block} is retained, yet not published")
        parent = block.parent
        outlived = isinstance(parent, Block) and not (
            parent.keep_until >= block.keep_until and parent.keep_ttl >= block.keep_ttl
        )
        _require(not outlived, f"{block} is retained longer than its parent")
    _check_ends(retention.ends, retained)
    grouped: defaultdict[bytes, list[Block]] = defaultdict(list)
    for block in retained:
        grouped[block.keep_owner].append(block)
    _require(grouped.keys() == retention.owners.keys(), "an owner is not known to retain, or is")
    for name, owner in retention.owners.items():
        counted = owner.count == len(grouped[name])
        _require(counted, f"{owner.count} blocks are counted as retained for an owner")
        _check_ends(owner.ends, grouped[name])


def _check_ends(ends: Ends, retained: Iterable[Block]) -> None:
    """Of these blocks, `ends` are those without a retained child, and it knows the first."""
    expected = [block for block in retained if not block.retained_children]
    for block in expected:
        _require(block in ends, f"{block} is an end, but not known as one")
        in_order = ends.first().keep_until <= block.keep_until
        _require(in_order, f"{block} would not be seen to end")
    _require(len(ends) == len(expected), f"{len(ends)} blocks are known as ends")


def _check_row(store: BlockStore, row: Row) -> None:
    """The row covers its tokens, and its committed whole blocks spell them from the root."""
    covers = -(-row.num_tokens // store.block_size) == len(row.table)
    _require(covers, f"{len(row.table)} blocks do not cover {row.num_tokens} tokens")
    whole = row.published_blocks(row.num_computed, store.block_size)
    parent: Node | None = store.index.roots.get(row.namespace)
    keys = block_keys(row.tokens, 0, whole, store.block_size)
    for block_id, key in zip(row.table, keys, strict=False):
        block = store.pool.blocks[block_id]
        _require(
            block.parent is not None and block.parent is parent and block.key == key,
            f"{block} is not what its row's tokens say",
        )
        parent = block
