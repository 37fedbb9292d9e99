"""The radix tree over published blocks: one node per block, keyed by its exact tokens.

Radix trees for KV reuse: SGLang, arXiv 2312.07104. Working in whole blocks needs no node splits,
and a path from a root spells the tokens whose KV its blocks hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ragcache.prefix.blocks import Block, Node
from ragcache.prefix.events import BlockSink
from ragcache.prefix.names import block_name


class RadixIndex:
    """What can be found: a tree per namespace. `generation` moves with every change.

    With a `sink` every block is named when it is published, and every change is told.
    """

    def __init__(self, sink: BlockSink | None = None) -> None:
        self.generation = 0
        self._sink = sink
        self.roots: dict[bytes, Node] = {}

    def root(self, namespace: bytes) -> Node:
        """Return the root of a namespace, new if need be; the caller inserts below it."""
        return self.roots.setdefault(namespace, Node(namespace))

    def match(self, namespace: bytes, keys: Iterable[bytes]) -> list[Block]:
        """Find the longest published run of blocks with these keys. Changes nothing."""
        node = self.roots.get(namespace)
        run: list[Block] = []
        if node is not None:
            children = node.children
            for key in keys:
                block = children.get(key)
                if block is None:
                    break
                run.append(block)
                children = block.children
        return run

    def insert(self, parent: Node, key: bytes, block: Block, now: float = 0.0) -> None:
        """Publish a block below its parent."""
        block.parent, block.key, block.published_at = parent, key, now
        parent.children[key] = block
        self.generation += 1
        if self._sink is not None:
            block.name = block_name(parent.name, key)
            self._sink.stored(block.name, block.on_host)

    def remove(self, leaf: Block) -> None:
        """Forget a published block that has no children, and its namespace after the last one."""
        parent = leaf.parent
        if parent is None or leaf.children:
            raise ValueError(f"{leaf} is not a leaf of the tree")
        del parent.children[leaf.key]
        self._unpublish(leaf)
        if not parent.children and parent.parent is None:
            del self.roots[parent.key]
        self.generation += 1

    def replace(self, old: Block, new: Block) -> None:
        """Put an unpublished block where `old` is. Costs a write for each of its children."""
        parent = old.parent
        if parent is None:
            raise ValueError(f"{old} is not in the tree")
        new.parent, new.key, new.name = parent, old.key, old.name
        new.hits, new.published_at, new.used_at = old.hits, old.published_at, old.used_at
        new.children, old.children = old.children, new.children
        for child in new.children.values():
            child.parent = new
        parent.children[new.key] = new
        _clear(old)
        self.generation += 1
        if self._sink is not None:
            self._sink.stored(new.name, new.on_host)

    def drop(self, prefix: bytes) -> list[Block]:
        """Forget the namespaces that begin so; returns their blocks, held ones included."""
        names = [namespace for namespace in self.roots if namespace.startswith(prefix)]
        blocks = [block for name in names for block in walk(self.roots.pop(name))]
        for block in reversed(blocks):  # children first
            self._unpublish(block)
        self.generation += 1
        return blocks

    def _unpublish(self, block: Block) -> None:
        if self._sink is not None:
            self._sink.removed(block.name)
        _clear(block)


def walk(root: Node) -> Iterator[Block]:
    """Yield every block below a node, parents before their children."""
    pending = list(root.children.values())
    while pending:
        block = pending.pop()
        yield block
        pending.extend(block.children.values())


def _clear(block: Block) -> None:
    block.parent, block.key, block.name, block.hits = None, b"", b"", 0
    block.children.clear()
