"""Mean, deviation, minimum and maximum of a list of numbers, under the usual metric names."""

from __future__ import annotations

import math
from collections.abc import Sequence


def get_std_min_max_avg(name: str, data: Sequence[float], metrics_dict: dict[str, float]) -> dict[str, float]:
    """Add ``{name}_mean``, ``_std`` (population), ``_max`` and ``_min`` to ``metrics_dict``; an empty list adds nothing.

    Example: ``get_std_min_max_avg("train_perf/task_duration", [1.0, 3.0], {})``
    """
    if len(data) == 0:
        return metrics_dict
    mean = math.fsum(data) / len(data)
    metrics_dict[f"{name}_mean"] = mean
    metrics_dict[f"{name}_std"] = math.sqrt(math.fsum((value - mean) ** 2 for value in data) / len(data))
    metrics_dict[f"{name}_max"] = max(data)
    metrics_dict[f"{name}_min"] = min(data)
    return metrics_dict
