"""Best of n: primary first, then secondary, then the first candidate."""

from __future__ import annotations

import pytest

from atroposlib.utils.best_of_n_selection import select_best_index


@pytest.mark.parametrize(
    ("primary", "secondary", "flags", "best"),
    [
        ([1.0, 3.0, 2.0], [0, 0, 0], {}, 1),
        ([1.0, 1.0, 0.5], [30, 20, 5], {}, 1),
        ([1.0, 1.0], [30, 20], {"secondary_lower_is_better": False}, 0),
        ([1.0, 3.0, 2.0], [0, 0, 0], {"primary_higher_is_better": False}, 0),
        ([1.0, 1.0], [5, 5], {}, 0),
    ],
)
def test_select(primary: list[float], secondary: list[float], flags: dict[str, bool], best: int) -> None:
    assert select_best_index(primary, secondary, **flags) == best


@pytest.mark.parametrize(("primary", "secondary"), [([], []), ([1.0], [1.0, 2.0])])
def test_refuses(primary: list[float], secondary: list[float]) -> None:
    with pytest.raises(ValueError):
        select_best_index(primary, secondary)
