"""Stand-alone evaluations: ``EvalBase`` runs every item of a data set against a server and averages the metrics."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import Any

from atroposlib.envs.eval_log import gather_bounded, model_name_of, write_evaluation

logger = logging.getLogger(__name__)
MAX_ITEMS_AT_ONCE = 256


def pass_at_k(m: int, c: float, k: int) -> float:
    """Unbiased estimate of the chance that one of ``k`` samples is right, from ``c`` right ones among ``m``.

    ``c`` may be a sum of scores. Example: ``pass_at_k(10, 3, 1)`` is 0.3.
    """
    if m - c < k:
        return 1.0
    return 1.0 - prod(1.0 - k / (m - c + 1 + i) for i in range(ceil(c)))


def evaluate_log(
    metrics: Mapping[str, Any],
    eval_dir: str | None = None,
    task_name: str | None = None,
    model_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    generation_parameters: Mapping[str, Any] | None = None,
    samples: Sequence[Any] | None = None,
    verbose: bool = True,
) -> None:
    """Write ``metrics.json`` and ``samples.jsonl`` under ``eval_dir`` and show a table."""
    write_evaluation(
        metrics,
        eval_dir=eval_dir,
        task_name=task_name or "eval",
        model_name=model_name,
        start_time=start_time,
        end_time=end_time,
        generation_parameters=generation_parameters or {},
        samples=samples,
        verbose=verbose,
    )


class EvalBase(ABC):
    """An evaluation: define ``setup_data`` and ``run_item``, then ``asyncio.run(eval_runner(MyEval()))``.

    Keyword arguments become attributes (``temperature``, ``top_p``, ``max_tokens``, ``eval_dir``, ...).
    """

    def __init__(self, pass_at_n: int = 1, pass_at_n_samples: int = 1, **attributes: Any) -> None:
        self.pass_at_n = pass_at_n
        self.pass_at_n_samples = pass_at_n_samples
        for name, value in attributes.items():
            setattr(self, name, value)
        self.data = self.setup_data()

    @abstractmethod
    def setup_data(self) -> list[Any]:
        """The items to evaluate on."""

    @abstractmethod
    async def run_item(self, server: Any, data_item: Any) -> tuple[dict[str, float], Any]:
        """Metrics of one item, and a sample to keep."""

    def get_generation_params(self) -> dict[str, Any]:
        """Sampling parameters: temperature, n, top_p, max_tokens."""
        return {
            "temperature": getattr(self, "temperature", 0.0),
            "n": max(self.pass_at_n, self.pass_at_n_samples),
            "top_p": getattr(self, "top_p", 1.0),
            "max_tokens": getattr(self, "max_tokens", -1),
        }

    async def chat_completion(self, server: Any, messages: list[Any]) -> Any:
        """Ask ``server`` with the generation parameters, as an evaluation request."""
        return await server.chat_completion(messages=messages, split="eval", **self.get_generation_params())

    @property
    def task_name(self) -> str:
        """``Class@n`` or ``Class@n:samples``."""
        samples = f":{self.pass_at_n_samples}" if self.pass_at_n_samples > 1 else ""
        return f"{type(self).__name__}@{self.pass_at_n}{samples}"

    async def __call__(self, server_manager: Any) -> dict[str, float]:
        """Run all items, average the metrics, write them down."""
        start = time.time()
        runs = (self.run_item(server_manager, item) for item in self.data)
        results = await gather_bounded(runs, max_at_once=MAX_ITEMS_AT_ONCE, title=self.task_name)
        names = list(dict.fromkeys(name for metrics, _ in results for name in metrics))
        averages = {name: _mean([metrics[name] for metrics, _ in results if name in metrics]) for name in names}
        evaluate_log(
            averages,
            eval_dir=getattr(self, "eval_dir", None),
            task_name=self.task_name,
            model_name=model_name_of(None, getattr(server_manager, "servers", None) or [server_manager]),
            start_time=start,
            end_time=time.time(),
            generation_parameters=self.get_generation_params(),
            samples=[sample for _, sample in results],
        )
        return averages


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


async def eval_runner(eval_env: EvalBase, argv: Sequence[str] | None = None) -> dict[str, float]:
    """Run an evaluation against the server named on the command line."""
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig
    from atroposlib.envs.server_handling.server_manager import ServerManager

    parser = argparse.ArgumentParser(description=f"evaluate {type(eval_env).__name__}")
    parser.add_argument("--server-url", default="http://localhost:8000", help="address of an OpenAI-compatible server")
    parser.add_argument("--model-name", required=True, help="model to ask for")
    parser.add_argument("--api-key", default="x", help="sent as bearer token")
    arguments = parser.parse_args(argv)
    url = arguments.server_url.rstrip("/")
    config = APIServerConfig(
        model_name=arguments.model_name,
        base_url=url if url.endswith("/v1") else f"{url}/v1",
        api_key=arguments.api_key,
        health_check=False,
    )
    return await eval_env(ServerManager([config]))


def run_eval(eval_env: EvalBase) -> dict[str, float]:
    """``eval_runner`` for plain scripts."""
    return asyncio.run(eval_runner(eval_env))
