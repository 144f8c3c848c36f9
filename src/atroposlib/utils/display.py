"""Tables on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def format_value(value: Any) -> str:
    """Numbers with four decimals, everything else as text."""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def display_metrics_table(
    task_name: str, metrics: Mapping[str, Any], start_time: float | None, end_time: float | None
) -> None:
    """Print the metrics of one evaluation as a table, with the time it took."""
    from rich.console import Console
    from rich.table import Table

    seconds = f" ({end_time - start_time:.1f} s)" if start_time is not None and end_time is not None else ""
    table = Table()
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(str(name), format_value(value))
    console = Console(file=sys.stdout)
    console.print(f"{task_name}{seconds}", markup=False, highlight=False)
    console.print(table)
