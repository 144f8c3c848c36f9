"""The quickstart's tasks: scores, splits, and a group through a scripted policy server."""

from __future__ import annotations

import pytest

from atroposlib.cli.serve_env import load_env_class, main
from atroposlib.envs.quickstart_env import ConciseSums, RepeatLetters
from atroposlib.envs.quickstart_task import answer_to, score_answer, score_sum, split_prompts, split_sums, sum_question
from atroposlib.errors import ConfigError


@pytest.mark.parametrize(
    ("answer", "stopped", "letters", "stop"),
    [
        ("DDD", True, 0.75, 0.25),
        ("DDD", False, 0.75, 0.0),
        ("DD", True, 0.5, 0.0),
        ("DDDDDD", True, 0.375, 0.0),
        ("AAA", True, 0.0, 0.25),
        ("", True, 0.0, 0.0),
    ],
)
def test_an_answer_is_worth_its_letters_and_its_end(answer: str, stopped: bool, letters: float, stop: float) -> None:
    assert answer_to("D3") == "DDD"
    assert score_answer("D3", answer, stopped=stopped) == {"letters": letters, "stop": stop}


@pytest.mark.parametrize("seed", range(5))
def test_held_out_prompts_are_other_combinations_of_known_parts(seed: int) -> None:
    train, held_out = split_prompts(12, 5, 0.2, seed)
    assert len(train) + len(held_out) == 60
    assert len(held_out) == 12
    assert not set(train) & set(held_out)
    assert {prompt[0] for prompt in held_out} <= {prompt[0] for prompt in train}
    assert {prompt[1:] for prompt in held_out} <= {prompt[1:] for prompt in train}
    assert split_prompts(12, 5, 0.2, seed) == (train, held_out)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("10", 1.0),
        ("3 + 7 = 10.", 1.0),
        ("The answer is 11", 0.0),
        ("3 + 7", 0.0),
        ("3 and 10", 0.0),
        ("ten", 0.0),
        ("", 0.0),
    ],
)
def test_sums(answer: str, score: float) -> None:
    assert score_sum((3, 7), answer) == score


def test_sums_held_out() -> None:
    train, held_out = split_sums(0)
    assert (len(train), len(held_out)) == (65, 16)
    assert not set(train) & set(held_out)
    assert sum_question((3, 7)) == "What is 3+7?"


def test_environments_are_found_by_name() -> None:
    assert load_env_class("atroposlib.envs.quickstart_env:RepeatLetters") is RepeatLetters
    assert load_env_class("atroposlib.envs.quickstart_env:ConciseSums") is ConciseSums
    with pytest.raises(ConfigError, match="did you mean 'ConciseSums'"):
        load_env_class("atroposlib.envs.quickstart_env:ConciseSum")
    with pytest.raises(ConfigError, match="defines 3 environments"):
        load_env_class("atroposlib.envs.quickstart_env")
    with pytest.raises(ConfigError, match="no environment module 'no_such_module'"):
        load_env_class("no_such_module:Env")
    with pytest.raises(ConfigError, match="no environment file"):
        load_env_class("nowhere/env.py:Env")


def test_an_environment_of_a_file(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "only_one_env.py"
    file.write_text(
        "from atroposlib.envs.quickstart_env import RepeatLetters\n\n\nclass Mine(RepeatLetters):\n    name = 'mine'\n"
    )
    assert load_env_class(str(file)).name == "mine"
    assert main([str(file), "check", "--env.group_size", "4"]) == 0
    assert main([str(file), "check", "--env.gruop_size", "4"]) == 2
    assert "did you mean '--env.group_size'" in capsys.readouterr().err
    assert main([]) == 2
