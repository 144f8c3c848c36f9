"""Gymnasium environments in words: played in their own process, scored by their own rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.cli.main import main as atropos
from atroposlib.cli.serve_gym import parse, settings_of
from atroposlib.envs.gym_env import GymConfig, GymEnv, describe_actions
from atroposlib.errors import ConfigError, WorkerError
from atroposlib.testing.harness_server import HarnessServer
from atroposlib.testing.scripted_server import script

pytest.importorskip("gymnasium")

LAKE: dict[str, Any] = {
    "gym_id": "FrozenLake-v1",
    "gym_arguments": {"is_slippery": False},
    "action_names": ["left", "down", "right", "up"],
}
TEXT_GAME = '''
import gymnasium
from gymnasium.spaces import Text

class Echo(gymnasium.Env):
    """Says a word; saying it back is worth 1 and ends the game."""
    observation_space = Text(20)
    action_space = Text(20)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = f"word{self.np_random.integers(1000)}"
        return self.word, {}
    def step(self, action):
        return self.word, float(action == self.word), action == self.word, False, {}

gymnasium.register("Echo-v0", Echo)
'''


def make(tokenizer: Any, replies: Any, **settings: Any) -> tuple[Any, Any]:
    config = GymConfig(
        tokenizer_name=tokenizer.name_or_path, use_wandb=False, group_size=2, num_eval_episodes=2, **settings
    )
    env = GymEnv(config, [], testing=True)
    return env, script(env, replies)


def act(name: str) -> str:
    return f"I go <action>{name}</action>"


async def test_a_lake_is_crossed_in_six_steps(tiny_tokenizer: Any) -> None:
    env, server = make(
        tiny_tokenizer, [act(way) for way in ("down", "down", "right", "right", "down", "Right")], **LAKE
    )
    await env.setup()
    try:
        rollout, _ = await env.collect_trajectory(0)
        await env.evaluate()
    finally:
        await env.stop()
    assert rollout["scores"] == 1.0
    assert rollout["reward_components"] == {"game": 1.0, "invalid": 0.0}
    assert "SFFF" in server.prompts[0]
    assert "\x1b" not in server.prompts[0]
    assert "left, down, right, up" in server.prompts[0]
    trained = tiny_tokenizer.decode([mask for mask in rollout["masks"] if mask != -100])
    assert trained.count("I go") == 6
    assert "SFFF" not in trained
    assert [message["role"] for message in rollout["messages"]][-1] == "assistant"


async def test_invalid_actions_cost_and_end_the_episode(tiny_tokenizer: Any) -> None:
    env, server = make(tiny_tokenizer, [act("fly"), "no action", act("7")], **LAKE)
    await env.setup()
    try:
        rollout, _ = await env.collect_trajectory(0)
    finally:
        await env.stop()
    assert rollout["scores"] == pytest.approx(-0.3)
    assert len(server.prompts) == 3
    assert "not a valid action" in server.prompts[1]


async def test_a_group_shares_its_seed_and_text_needs_no_translation(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo_game.py").write_text(TEXT_GAME)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def reply(prompt: str) -> str:
        word = prompt.split("user\n")[1].split("<|im_end|>")[0]
        return act(word)

    env, server = make(tiny_tokenizer, reply, gym_id="Echo-v0", gym_module="echo_game")
    await env.setup()
    try:
        group, _ = await env.collect_trajectories(5)
    finally:
        await env.stop()
    assert group["scores"] == [1.0, 1.0]
    assert len(set(server.prompts)) == 1
    assert "<action>your text</action>" in server.prompts[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gym_id": "FrozenLak-v1"}, "no environment 'FrozenLak-v1'; did you mean FrozenLake-v1 or"),
        ({"gym_id": "QQQ"}, r"no environment 'QQQ'; gymnasium.pprint_registry\(\) lists"),
        (
            {**LAKE, "gym_arguments": {"slip": 1}},
            r"fails with the arguments {\"slip\": 1}: TypeError: .*slip.* \(.*, line",
        ),
        ({**LAKE, "gym_module": "no_such"}, "--module 'no_such' cannot be imported by .*: ModuleNotFoundError"),
    ],
)
async def test_a_game_that_cannot_be_made_is_one_line(
    tiny_tokenizer: Any,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    words: str,
) -> None:
    env, _ = make(tiny_tokenizer, ["x"], **settings)
    with caplog.at_level("DEBUG", "atroposlib.envs.worker_process"), pytest.raises(WorkerError, match=words) as told:
        await env.setup()
    await env.stop()
    assert "\n" not in str(told.value)
    assert "Traceback" not in capfd.readouterr().err
    assert ["Traceback" in record.message for record in caplog.records if record.levelname == "DEBUG"] == [True]


def test_descriptions() -> None:
    assert "NUMBER from Discrete(2)" in describe_actions(
        "Go.", {"action_kind": "discrete", "action_space": "Discrete(2)", "action_names": []}
    )
    assert "JSON from Box" in describe_actions(
        "Go.", {"action_kind": "box", "action_space": "Box(1,)", "action_names": []}
    )


def test_command(tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, rest = parse(["Taxi-v3", "--actions", "a, b", "--env.max_turns", "3"])
    assert rest == ["serve", "--env.max_turns", "3"]
    assert settings_of(options)["action_names"] == ["a", "b"]
    with pytest.raises(ConfigError, match="not JSON"):
        settings_of(parse(["Taxi-v3", "--make-args", "{"])[0])
    monkeypatch.chdir(tmp_path)
    with HarnessServer(tokenizer=tiny_tokenizer, reply="<action>stick</action>") as server:
        flags = {
            "--env.tokenizer_name": tiny_tokenizer.name_or_path,
            "--env.group_size": "2",
            "--env.total_steps": "2",
            "--env.use_wandb": "false",
            "--env.data_path_to_save_groups": str(tmp_path / "out.jsonl"),
            "--openai.base_url": server.base_url,
            "--openai.model_name": tiny_tokenizer.name_or_path,
            "--openai.server_type": "vllm",
            "--openai.health_check": "false",
        }
        code = atropos(
            [
                "serve-gym",
                "Blackjack-v1",
                "--actions",
                "stick,hit",
                "process",
                *(word for pair in flags.items() for word in pair),
            ]
        )
    assert code == 0
    groups = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(groups) == 2
    assert all(group["scores"][0] == group["scores"][1] for group in groups)  # same cards, same decision
