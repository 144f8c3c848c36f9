"""What each built-in reward gives for known texts."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from atroposlib.envs.reward_fns.accuracy_reward import AccuracyReward, accuracy_reward, final_answer
from atroposlib.envs.reward_fns.cascading_r1_math_reward import cascading_r1_math_reward
from atroposlib.envs.reward_fns.chandas_meter_reward import ChandasMeterReward, iast_to_slp1, scan
from atroposlib.envs.reward_fns.cosine_scaled_reward import CosineScaledReward
from atroposlib.envs.reward_fns.crossword_format_reward import CrosswordFormatReward
from atroposlib.envs.reward_fns.format_reward import FormatReward
from atroposlib.envs.reward_fns.r1_reward import AccuracyXReward, FormatReasoningReward, R1Reward
from atroposlib.envs.reward_fns.reasoning_steps_reward import ReasoningStepsReward
from atroposlib.envs.reward_fns.repetition_penalty_reward import RepetitionPenaltyReward
from atroposlib.errors import MissingExtraError, RewardComputationError

ANSWERS = [
    (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"<think>\boxed{3}</think> \boxed{4}", "4", 1.0),
    (r"<think>\boxed{4}</think> \boxed{3}", "4", 0.0),
    (r"\boxed{4}", r"the result is \boxed{4}", 1.0),
    ("2 + 2\n#### 4", "#### 4", 1.0),
    ("#### 1,234", 1234, 1.0),
    (r"\boxed{x=1}", "x=1", 1.0),
    (r"\boxed{\text{Paris}}", r"\text{Paris}", 1.0),
    ("four", "4", 0.0),
    (r"\boxed{1}" * 7, "1", 0.0),
    ("", "4", 0.0),
]


@pytest.mark.parametrize(("text", "gold", "expected"), ANSWERS)
def test_accuracy(text: str, gold: object, expected: float) -> None:
    assert accuracy_reward([text], solution=gold) == [expected]


def test_accuracy_works_off_the_main_thread() -> None:
    texts, golds = [text for text, _, _ in ANSWERS], [gold for _, gold, _ in ANSWERS]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(AccuracyReward(), texts, solution=golds).result() == [expected for *_, expected in ANSWERS]
        assert pool.submit(AccuracyReward(), [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2}"], solution="2").result() == [
            0.0,
            1.0,
        ]


def test_accuracy_arguments() -> None:
    assert AccuracyReward()([r"\boxed{1}"], solution="2", ground_truth="1") == [1.0]
    assert AccuracyReward(split_on_think_tag=False)([r"\boxed{2}</think>"], solution="2") == [1.0]
    with pytest.raises(RewardComputationError, match="needs solution"):
        AccuracyReward()(["x"])
    assert final_answer(r"a \boxed{\frac{1}{2}} b") == r"\frac{1}{2}"
    assert final_answer(r"\boxed{open") is None


def test_format() -> None:
    texts = ["<think>a</think>", "<ANSWER>a</ANSWER>", "<think>a</think><answer>b</answer>", "<think>open"]
    assert FormatReward()(texts) == [1.0, 1.0, 1.0, 0.0]
    assert FormatReward(require_all_tags=True)(texts) == [0.0, 0.0, 1.0, 0.0]
    assert FormatReward(case_sensitive=True, preferred_tags=["answer"])(texts) == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("short", 0.0),
        ("word " * 11, 0.1),
        ("Step 1 a\nStep 2 b\nStep 3 c", 0.5),
        ("1. a\n2. b\n3. c", 0.5),
        ("- a\n- b\n- c", 0.4),
        ("Step 1: first\nStep 2: then\nStep 3: finally\n1. a\n2. b\n3. c\n", 1.0),
    ],
)
def test_reasoning_steps(text: str, expected: float) -> None:
    (reward,) = ReasoningStepsReward()([text])
    assert reward == pytest.approx(expected)


def test_repetition_penalty() -> None:
    fine = "The quick brown fox jumps over a lazy dog. Nobody had ever seen anything quite like that before."
    said_again = "We add the two numbers. We add the two numbers. Then the result is printed for everyone to see."
    stuttering = "the the the the cat cat cat cat sat sat sat sat. a a a a dog dog dog dog ran ran ran ran"
    short, clean, repeated, stutter = RepetitionPenaltyReward()(["too short", fine, said_again, stuttering])
    assert (short, clean) == (-0.1, 0.0)
    assert repeated == pytest.approx(-0.6 - 0.4 / 3)
    assert stutter is not None
    assert -1.0 <= stutter < -0.3


def test_cosine_scaled_needs_no_model() -> None:
    same, near, far, empty = CosineScaledReward()(["a cat sat", "a cat sits", "12345", ""], solution="a cat sat") or []
    assert same == pytest.approx(1.0)
    assert near is not None
    assert far is not None
    assert 0.3 < near < 0.95
    assert far < 0.2
    assert empty == 0.0
    assert CosineScaledReward(scale_factor=10.0)(["12345"], solution="a cat") == [-1.0]


def test_cosine_scaled_with_a_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError, match="sentence-transformers"):
        CosineScaledReward(model_name="all-MiniLM-L6-v2")


def test_r1() -> None:
    texts = [
        "<think>a</think> It is 42.",
        "It is 42.",
        "<think>42</think> no",
        "<think>a</think>",
        "<think>a</think><think>b</think>42",
    ]
    assert R1Reward()(texts, solution="42") == [1.5, 1.0, 0.5, 0.0, 1.0]
    assert R1Reward(format_weight=1.0, accuracy_weight=2.0)(texts[:1], solution="42") == [3.0]
    assert FormatReasoningReward()(texts) == [0.5, 0.0, 0.5, 0.0, 0.0]
    assert FormatReasoningReward(allow_multiple_thinking=True)(texts[4:]) == [0.5]
    assert AccuracyXReward(exact_match=True)(["<think>x</think> Paris", "Paris!"], solution="paris") == [1.0, 0.0]
    assert AccuracyXReward(case_sensitive=True)(["paris"], solution="Paris") == [0.0]


def test_cascading() -> None:
    texts = [
        r"<think>a</think> \boxed{4}",
        r"\boxed{4}",
        r"<think>a</think> <b>\boxed{4}</b>",
        r"<think>a</think> \boxed{5}",
    ]
    assert cascading_r1_math_reward(texts, solution="4") == [1.5, 1.0, 1.0, 0.0]


def test_crossword() -> None:
    texts = ["1-Across: HELLO\n2-Down: WORLD", "1-Across: H3LLO", "HELLO", "1-across: hello"]
    assert CrosswordFormatReward()(texts) == [1.0, 0.0, 0.0, 1.0]
    assert CrosswordFormatReward(penalize_invalid_chars=False, reward_value=2.0)(texts) == [2.0, 2.0, 0.0, 2.0]
    assert CrosswordFormatReward(format_patterns=[r"A\d=\w+"])(["A1=CAT"]) == [1.0]


def test_chandas() -> None:
    assert iast_to_slp1("dharmakṣetre") == "Darmakzetre"
    assert scan("dharmakṣetre kurukṣetre") == "GGGGLGGG"
    # Bhagavad Gita 2.22, two quarters in upendravajra, two in indravajra, but for quarter one: it opens with "vāsāṃsi"
    verse = "vāsāṃsi jīrṇāni yathā vihāya\nnavāni gṛhṇāti naro'parāṇi\ntathā śarīrāṇi vihāya jīrṇāni\nanyāni saṃyāti navāni dehī"
    (reward,) = ChandasMeterReward()([verse])
    assert reward == 0.75  # the third quarter has a syllable too many
    assert ChandasMeterReward()(["Hello there, this is plain English."]) == [0.0]
    with pytest.raises(ValueError, match="meter"):
        ChandasMeterReward(meter="limerick")
