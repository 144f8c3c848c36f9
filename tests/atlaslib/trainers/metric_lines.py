"""What a run wrote to its metrics file."""

from __future__ import annotations

import json
from pathlib import Path


def read_metrics(folder: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
