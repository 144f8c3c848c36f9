"""Pick the best of n scored candidates."""

from __future__ import annotations

from collections.abc import Sequence


def select_best_index(
    primary_scores: Sequence[float],
    secondary_scores: Sequence[float],
    primary_higher_is_better: bool = True,
    secondary_lower_is_better: bool = True,
) -> int:
    """Index of the best candidate by primary score; ties go to the better secondary score, then to the first.

    Example: ``select_best_index([1.0, 1.0, 0.5], [30, 20, 5]) == 1`` (same score, shorter answer).
    """
    if not primary_scores or len(primary_scores) != len(secondary_scores):
        raise ValueError(
            "select_best_index needs two non-empty lists of equal length, "
            f"got {len(primary_scores)} primary and {len(secondary_scores)} secondary scores"
        )
    primary_sign = 1.0 if primary_higher_is_better else -1.0
    secondary_sign = -1.0 if secondary_lower_is_better else 1.0
    return max(  # max keeps the first of equals
        range(len(primary_scores)),
        key=lambda index: (primary_sign * primary_scores[index], secondary_sign * secondary_scores[index]),
    )
