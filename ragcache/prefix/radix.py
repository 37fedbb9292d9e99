"""The radix tree over published blocks: one node per block, keyed by its exact tokens.

Radix trees for KV reuse: SGLang, arXiv 2312.07104. Working in whole blocks needs no node splits,
and a path from a root spells the tokens whose KV its blocks hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ragcache.prefix.blocks import Block, Node


class RadixIndex:
    """What can be found: a tree per namespace. `generation` moves with every change."""

    def __init__(self) -> None:
        self.generation = 0
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

    def remove(self, leaf: Block) -> None:
        """Forget a published block that has no children, and its namespace after the last one."""
        parent = leaf.parent
        if parent is None or leaf.children:
            raise ValueError(f"{leaf} is not a leaf of the tree")
        del parent.children[leaf.key]
        _unpublish(leaf)
        if not parent.children and parent.parent is None:
            del self.roots[parent.key]
        self.generation += 1

    def replace(self, old: Block, new: Block) -> None:
        """Put an unpublished block where `old` is. Costs a write for each of its children."""
        parent = old.parent
        if parent is None:
            raise ValueError(f"{old} is not in the tree")
        new.parent, new.key, new.name = parent, old.key, old.name
        new.hits, new.published_at = old.hits, old.published_at
        new.children, old.children = old.children, new.children
        for child in new.children.values():
            child.parent = new
        parent.children[new.key] = new
        _unpublish(old)
        self.generation += 1

    def drop(self, prefix: bytes) -> list[Block]:
        """Forget the namespaces that begin so; returns their blocks, held ones included."""
        names = [namespace for namespace in self.roots if namespace.startswith(prefix)]
        blocks = [block for name in names for block in walk(self.roots.pop(name))]
        for block in blocks:
            _unpublish(block)
        self.generation += 1
        return blocks


def walk(root: Node) -> Iterator[Block]:
    """Yield every block below a node, parents before their children."""
    pending = list(root.children.values())
    while pending:
        block = pending.pop()
        yield block
        pending.extend(block.children.values())


def _unpublish(block: Block) -> None:
    block.parent, block.key, block.name, block.hits = None, b"", None, 0
    block.children.clear()
