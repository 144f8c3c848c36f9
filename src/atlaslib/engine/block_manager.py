"""Which block of the key-value cache belongs to whom: a free list, reference counts and the prefix tree.

A block holds the keys and values of `block_size` consecutive tokens. Full blocks are nodes of a tree, found by
(parent node, their tokens), so a prompt that starts like an earlier one shares its blocks. A block that nobody
uses any more stays findable until it is handed out again, oldest first.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

ROOT = 0


class BlockManager:
    """Hands out blocks by number; knows nothing of tensors."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))
        self._users = [0] * num_blocks
        self._node_of: dict[tuple[int, bytes], tuple[int, int]] = {}  # key -> (node, block)
        self._key_of: dict[int, tuple[int, bytes]] = {}  # block -> key
        self._next_node = ROOT + 1
        self.hits = 0  # tokens found in the prefix tree
        self.lookups = 0  # tokens looked up

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self) -> int:
        """A block of your own; the caller has checked `num_free`."""
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._users[block] = 1
        return block

    def share(self, block: int) -> int:
        """One more user of a block that is in use or still findable."""
        if self._users[block] == 0:
            del self._free[block]
        self._users[block] += 1
        return block

    def release(self, blocks: list[int]) -> None:
        """Give blocks back, the last of a sequence first, so that beginnings stay findable longest."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def users(self, block: int) -> int:
        return self._users[block]

    def find_prefix(self, tokens: NDArray[np.int64], *, limit: int) -> tuple[list[int], int]:
        """Blocks that hold the beginning of `tokens` (at most `limit` tokens) and the tree node where they end."""
        found: list[int] = []
        node = ROOT
        size = self.block_size
        for start in range(0, limit - size + 1, size):
            hit = self._node_of.get((node, tokens[start : start + size].tobytes()))
            if hit is None:
                break
            node, block = hit
            found.append(block)
        self.lookups += limit
        self.hits += len(found) * size
        return found, node

    def remember(self, block: int, parent: int, tokens: NDArray[np.int64]) -> int:
        """Make a full block findable below `parent`; returns its node (the older twin's when there is one)."""
        key = (parent, tokens.tobytes())
        known = self._node_of.get(key)
        if known is not None:
            return known[0]
        node = self._next_node
        self._next_node += 1
        self._node_of[key] = (node, block)
        self._key_of[block] = key
        return node

    def forget_all(self) -> None:
        """Nothing cached may be found any more (the weights changed); blocks in use stay with their users."""
        self._node_of.clear()
        self._key_of.clear()

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._node_of[key]
