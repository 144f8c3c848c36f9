"""Is a Sanskrit verse in its metre?

The text is read as IAST, turned into SLP1 (one letter per sound) and scanned into heavy and light syllables; no other
package is needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.errors import ConfigError

# One quarter (pada) of each metre: G heavy, L light, x either.
METERS: dict[str, str] = {
    "tristubh": "xGLGGLLGLGx",
    "indravajra": "GGLGGLLGLGx",
    "upendravajra": "LGLGGLLGLGx",
    "jagati": "xGLGGLLGLGLx",
    "anustubh": "xxxxLGGx",
    "vasantatilaka": "GGLGLLLGLLGLGx",
}
_PADAS = 4
_IAST = [
    ("ai", "E"), ("au", "O"), ("ā", "A"), ("ī", "I"), ("ū", "U"), ("ṝ", "F"), ("ṛ", "f"), ("ḹ", "X"), ("ḷ", "x"),
    ("kh", "K"), ("gh", "G"), ("ch", "C"), ("jh", "J"), ("ṭh", "W"), ("ḍh", "Q"), ("th", "T"), ("dh", "D"), ("ph", "P"), ("bh", "B"),
    ("ṅ", "N"), ("ñ", "Y"), ("ṭ", "w"), ("ḍ", "q"), ("ṇ", "R"), ("ś", "S"), ("ṣ", "z"), ("ṃ", "M"), ("ṁ", "M"), ("ḥ", "H"),
]  # fmt: skip
_SYLLABLE = re.compile(r"[aAiIuUfFxXeEoO][^aAiIuUfFxXeEoO]*")
_LONG = frozenset("AIUFXeEoO")


@registry.register
@registry.register(name="chandas_meter")
class ChandasMeterReward(RewardFunction):
    """Share of the verse's quarters that scan in ``meter``; 1.0 needs all four.

    Quarters are the lines of the text (``|`` and ``।`` also end one); a line of two quarters counts as two.
    """

    def __init__(self, meter: str = "tristubh", weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight=weight, **kwargs)
        if meter.lower() not in METERS:
            raise ConfigError(f"meter ({meter!r}) is not one of {', '.join(sorted(METERS))}")
        self.meter = meter.lower()

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        return [self._score(self.get_content(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        pattern = METERS[self.meter]
        quarters: list[str] = []
        for line in re.split(r"[\n|।॥/]+", text):
            weights = scan(line)
            middle = len(pattern)
            quarters += (
                [weights[:middle], weights[middle:]] if len(weights) == 2 * middle else [weights] if weights else []
            )
        fitting = sum(_fits(quarter, pattern) for quarter in quarters)
        return min(1.0, fitting / max(_PADAS, len(quarters)))


def chandas_meter_reward(completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """``ChandasMeterReward()(completions)``."""
    return ChandasMeterReward()(completions, **kwargs)


def iast_to_slp1(text: str) -> str:
    """IAST letters as SLP1, one letter per sound: ``iast_to_slp1("dharmakṣetre") == "Darmakzetre"``."""
    result = text.lower()
    for iast, slp1 in _IAST:
        result = result.replace(iast, slp1)
    return result


def scan(line: str) -> str:
    """The syllable weights of a line: G for a long vowel or one before several consonants (also M, H), else L."""
    sounds = re.sub(r"[^A-Za-z]", "", iast_to_slp1(line))
    return "".join(_weight(match.group()) for match in _SYLLABLE.finditer(sounds))


def _weight(syllable: str) -> str:
    vowel, tail = syllable[0], syllable[1:]
    return "G" if vowel in _LONG or len(tail) > 1 or tail[:1] in ("M", "H") else "L"


def _fits(quarter: str, pattern: str) -> bool:
    return len(quarter) == len(pattern) and all(want in ("x", got) for got, want in zip(quarter, pattern, strict=True))
