"""What environments that live in another process have in common: it ends when the run ends."""

from __future__ import annotations

from typing import Any

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.worker_process import WorkerProcess


class ForeignEnv(BaseEnv):
    """Set ``self.worker`` in ``setup()``; ``stop()`` is called after serve, process and evaluate, also after a failure."""

    worker: WorkerProcess | None = None

    async def stop(self) -> None:
        """End the worker."""
        if self.worker is not None:
            await self.worker.stop()

    async def env_manager(self) -> None:
        try:
            await super().env_manager()
        finally:
            await self.stop()

    async def process_manager(self) -> None:
        try:
            await super().process_manager()
        finally:
            await self.stop()

    async def _run_evaluate(self) -> Any:
        try:
            return await super()._run_evaluate()
        finally:
            await self.stop()
