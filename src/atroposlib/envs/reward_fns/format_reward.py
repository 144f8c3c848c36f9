"""Does the text use the tags it was asked to use?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction


@registry.register
class FormatReward(RewardFunction):
    """1.0 when any (``require_all_tags``: every) ``<tag>...</tag>`` of ``preferred_tags`` occurs, else 0.0."""

    def __init__(
        self,
        preferred_tags: Sequence[str] | None = None,
        require_all_tags: bool = False,
        case_sensitive: bool = False,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.preferred_tags = list(preferred_tags or ("think", "answer"))
        self.require_all_tags = require_all_tags
        self.case_sensitive = case_sensitive

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        flags = re.DOTALL | (0 if self.case_sensitive else re.IGNORECASE)
        names = [re.escape(tag) for tag in self.preferred_tags]
        patterns = [re.compile(f"<{name}>.*?</{name}>", flags) for name in names]
        enough = all if self.require_all_tags else any
        texts = map(self.get_content, completions)
        return [1.0 if enough(pattern.search(text) for pattern in patterns) else 0.0 for text in texts]


def format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """``FormatReward()(completions)``; ``preferred_tags``, ``require_all_tags`` and ``case_sensitive`` are taken."""
    settings = {
        key: kwargs.pop(key) for key in ("preferred_tags", "require_all_tags", "case_sensitive") if key in kwargs
    }
    return FormatReward(**settings)(completions, **kwargs)
