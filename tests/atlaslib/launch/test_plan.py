"""Plans: reading, overrides, errors that name file, key and nearest key, the processes that come out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from atlaslib.errors import ConfigError
from atlaslib.launch.plan import (
    apply_override,
    check_plan,
    check_trainer,
    describe,
    env_file_content,
    env_names,
    fix_ports,
    load_plan,
    make_plan,
    processes,
    write_files,
)
from atlaslib.launch.running import run_plan

TASK = "atroposlib.envs.quickstart_env:RepeatLetters"


def write(tmp_path: Path, **content: object) -> Path:
    path = tmp_path / "two_tasks.yaml"
    path.write_text(yaml.safe_dump({"environments": [{"path": TASK}], **content}))
    return path


def test_a_plan_with_defaults(tmp_path: Path) -> None:
    plan = load_plan(write(tmp_path), [])
    assert (plan.name, str(plan.run_dir), plan.model) == ("two_tasks", "runs/two_tasks", "tiny")
    assert plan.environments[0].weight == 1.0


def test_overrides_reach_into_lists_and_read_numbers(tmp_path: Path) -> None:
    plan = load_plan(
        write(tmp_path),
        ["trainer.learning_rate=1e-3", "environments.0.weight=2", "environments.0.config.group_size=4", "name=x"],
    )
    assert plan.trainer == {"learning_rate": 0.001}
    assert plan.environments[0].weight == 2.0
    assert plan.environments[0].config == {"group_size": 4}
    assert str(plan.run_dir) == "runs/x"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_steps", "is not of the form key=value"),
        ("environments.7.weight=2", "'7' is not a position of a list of 1"),
        ("environments.first.weight=2", "'first' is not a position"),
    ],
)
def test_overrides_that_cannot_work(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_override({"environments": [{"path": TASK}]}, override)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"trainr": {}}, r"two_tasks.yaml: unknown key 'trainr'; did you mean 'trainer'"),
        (
            {"environments": [{"path": TASK, "wieght": 1}]},
            r"unknown key 'wieght'; did you mean 'weight'\? \(under environments\.0\)",
        ),
        ({"rollout_server": {"prot": 1}}, r"unknown key 'prot'; did you mean 'port'\? \(under rollout_server\)"),
        ({"environments": []}, r"two_tasks.yaml: environments: "),
        ({"environments": [{"path": TASK, "weight": -1}]}, r"environments\.0\.weight: .*\(got -1\)"),
        ({"environments": [{"weight": 1}]}, r"environments\.0\.path: Field required"),
    ],
)
def test_errors_name_file_key_and_nearest_key(tmp_path: Path, content: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_plan(write(tmp_path, **content), [])


def test_a_file_that_is_missing_or_not_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_plan(tmp_path / "none.yaml", [])
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_plan(broken, [])
    broken.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_plan(broken, [])
    broken.write_text("- 1")
    with pytest.raises(ConfigError, match="must hold keys and values"):
        load_plan(broken, [])


def test_trainer_keys_are_checked_against_the_trainer() -> None:
    plan = make_plan({"environments": [{"path": TASK}], "trainer": {"lerning_rate": 1}}, where="f.yaml")
    with pytest.raises(ConfigError, match=r"f.yaml: trainer: unknown key 'lerning_rate'; did you mean 'learning_rate'"):
        check_trainer(plan, where="f.yaml")
    plan.trainer = {"max_steps": "many"}
    with pytest.raises(ConfigError, match=r"f.yaml: trainer.max_steps='many': expected int"):
        check_trainer(plan, where="f.yaml")
    plan.trainer = {"output_dir": "x"}
    with pytest.raises(ConfigError, match="set by the supervisor"):
        check_trainer(plan, where="f.yaml")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"path": "no_such_file.py:Env"}, r"environments\.0 \(no_such_file.py:Env\): no environment file"),
        (
            {"path": "atroposlib.envs.quickstart_env:RepeatLeters"},
            "unknown environment 'RepeatLeters'; did you mean 'RepeatLetters'",
        ),
        ({"path": TASK, "config": {"group_size": 0}}, "env.group_size is 0; it must be 1 or more"),
        ({"path": TASK, "config": {"gruop_size": 4}}, "unknown key .*'gruop_size'; did you mean 'group_size'"),
    ],
)
def test_environments_are_checked_before_anything_starts(environment: dict[str, object], message: str) -> None:
    plan = make_plan({"environments": [environment]}, where="f.yaml")
    with pytest.raises(ConfigError, match=message):
        check_plan(plan, where="f.yaml")


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    plan = make_plan({"environments": [{"path": TASK}], "run_dir": str(tmp_path / "file" / "run")}, where="f.yaml")
    with pytest.raises(ConfigError, match=r"run_dir: the folder .* cannot be made"):
        run_plan(plan, title="a run")


def test_a_model_folder_must_exist() -> None:
    plan = make_plan({"model": "./nowhere", "environments": [{"path": TASK}]}, where="f.yaml")
    with pytest.raises(ConfigError, match=r"model: no folder './nowhere'"):
        check_plan(plan, where="f.yaml")


def test_processes_and_files(tmp_path: Path) -> None:
    plan = make_plan(
        {
            "run_dir": str(tmp_path / "run"),
            "trainer": {"max_batches_offpolicy": 2},
            "environments": [
                {"path": TASK, "copies": 2, "weight": 3},
                {"path": TASK, "name": "other", "config": {"group_size": 4}},
            ],
            "rollout_server": {"token": "secret"},
        },
        where="f.yaml",
    )
    fix_ports(plan)
    write_files(plan)
    assert env_names(plan) == [["repeat_letters_0", "repeat_letters_1"], ["other"]]
    specs = {spec.name: spec for spec in processes(plan)}
    assert list(specs) == ["server", "trainer", "repeat_letters_0", "repeat_letters_1", "other"]
    assert specs["trainer"].ends_run
    assert specs["server"].ready_url == f"http://127.0.0.1:{plan.rollout_server.port}/healthz"
    assert specs["other"].env["ATROPOS_TOKEN"] == "secret"
    content = yaml.safe_load((tmp_path / "run" / "env_other.yaml").read_text())
    assert content["env"]["group_size"] == 4
    assert content["env"]["max_batches_offpolicy"] == 2
    assert content["openai"]["base_url"] == f"http://127.0.0.1:{plan.policy_server.port}/v1"
    assert env_file_content(plan, plan.environments[0], "x")["env"]["inference_weight"] == 3
    shown = describe(plan)
    assert "secret" not in shown
    assert "atroposlib.cli.run_api" in shown


def test_an_external_policy_server() -> None:
    plan = make_plan(
        {"environments": [{"path": TASK}], "policy_server": {"url": "http://gpu:8000/v1", "server_type": "openai"}},
        where="f",
    )
    assert plan.policy_url == "http://gpu:8000"
    assert env_file_content(plan, plan.environments[0], "x")["openai"]["base_url"] == "http://gpu:8000/v1"


@pytest.mark.parametrize(
    ("model", "layers", "environment"),
    [("tiny", None, "RepeatLetters"), ("smollm2", 10, "ConciseSums"), ("/some/model", None, "ConciseSums")],
)
def test_quickstart_plans_are_valid(model: str, layers: int | None, environment: str) -> None:
    from atlaslib.cli.quickstart import parse, plan_content
    from atlaslib.trainers.grpo_config import GRPOConfig

    plan = make_plan(plan_content(parse(["--model", model, "--steps", "7"])), where="quickstart")
    check_trainer(plan, where="quickstart")
    config = GRPOConfig(output_dir="unused", report_to=[], use_cpu=True, **plan.trainer)
    assert (config.trainable_layers, config.max_steps) == (layers, 7)
    assert plan.environments[0].path.endswith(f":{environment}")
