"""A whole copy of a sharded policy for sampling (FSDP, DeepSpeed ZeRO-3).

The embedded engine wants whole weights; a sharded policy has pieces. Each process keeps one whole copy and fills it from the
shards before a round. For models too large for that, sample with vLLM servers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

from atlaslib.generation.engine_sampler import EngineSampler


def whole_copy(model: Any) -> Any:
    """A frozen copy made before the policy is sharded."""
    copied = copy.deepcopy(model)
    copied.requires_grad_(False)
    return copied.eval()


class ReplicaSampler(EngineSampler):
    """The engine over the copy; ``sync`` fills it from the shards. Every process must call it at the same point."""

    def __init__(self, engine: Any, replica: Any, policy: Any) -> None:
        super().__init__(engine)
        self._replica, self._policy = replica, policy
        self._version: int | None = None

    def sync(self, version: int) -> None:
        """Gather each weight and copy it; the engine's version becomes ``version``."""
        if self._version == version:
            return
        with self.engine.updating(), torch.no_grad():
            for target, source in zip(self._replica.parameters(), self._policy.parameters(), strict=True):
                with whole(source) as tensor:
                    target.copy_(tensor.to(target.device, target.dtype))
        self.engine.version = self._version = version


@contextlib.contextmanager
def whole(parameter: Any) -> Iterator[torch.Tensor]:
    """A parameter put together from its shards for the length of the block; all processes take part. Others as they are."""
    if not hasattr(parameter, "ds_id"):
        yield parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        yield parameter
