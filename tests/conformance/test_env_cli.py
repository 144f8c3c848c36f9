"""The command line of an environment: every way to set a value, which one wins, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

from atroposlib.envs import env_cli
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, ServerBaseline
from atroposlib.errors import ConfigError
from simple_env import NumbersEnv

SECRET = "sk-very-secret"


class CliConfig(BaseEnvConfig):
    topics: list[str] = Field(default_factory=lambda: ["sums"], description="What to ask about.")
    limits: dict[str, int] = Field(default_factory=dict, description="Bounds by name.")


class CliEnv(NumbersEnv):
    name = "cli_numbers"
    env_config_cls = CliConfig

    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        config = CliConfig(group_size=6, total_steps=50, wandb_name="from-init", use_wandb=False)
        return config, [APIServerConfig(model_name="init-model", base_url="http://127.0.0.1:1/v1", api_key=SECRET)]


class TwoServers(CliEnv):
    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        return CliConfig(), [APIServerConfig(base_url=f"http://127.0.0.1:{port}/v1") for port in (1, 2)]


class Baseline(CliEnv):
    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        return CliConfig(), ServerBaseline(model_name="found")


class Unset(NumbersEnv):
    name = None


def settings(*argv: str, env: Any = CliEnv, command: str = "serve") -> Any:
    return env_cli.resolve(env, command, argv)


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


@pytest.mark.parametrize("command", ["serve", "process", "evaluate"])
def test_flags_over_yaml_over_config_init_over_defaults(command: str, tmp_path: Path):
    config = write(
        tmp_path / "c.yaml", {"env": {"group_size": 7, "total_steps": 70, "batch_size": 70}, "openai": {"timeout": 7}}
    )
    resolved = settings("--config", config, "--env.group_size", "8", "--openai.model_name=flag-model", command=command)
    assert resolved.env_config.group_size == 8  # flag
    assert resolved.env_config.batch_size == 70  # YAML
    assert resolved.env_config.total_steps == 70  # YAML over config_init
    assert resolved.env_config.wandb_name == "from-init"  # config_init
    assert resolved.env_config.max_eval_workers == 16  # default
    server = resolved.server_configs[0]
    assert (server.model_name, server.timeout, server.base_url, server.api_key) == (
        "flag-model",
        7,
        "http://127.0.0.1:1/v1",
        SECRET,
    )


def test_values_of_every_kind():
    resolved = settings(
        *("--env.total_steps", "-1", "--env.max_num_workers=-1", "--env.inference_weight", "-1.5"),
        *("--env.topics", "sums", "products", "--env.limits", "{a: 1}", "--env.wandb_name", "None"),
        *("--env.use_wandb", "false", "--env.eval_handling", "LIMIT_TRAIN", "--env.min_batch_allocation", "0.25"),
        *("--env.group-size", "3", "--slurm", "false", "--testing", "true"),
    )
    config = resolved.env_config
    assert (config.total_steps, config.max_num_workers, config.inference_weight) == (-1, -1, -1.5)
    assert config.topics == ["sums", "products"]
    assert config.limits == {"a": 1}
    assert config.use_wandb is False
    assert config.eval_handling.value == "LIMIT_TRAIN"
    assert config.min_batch_allocation == 0.25
    assert config.group_size == 3
    assert (resolved.slurm, resolved.testing) == (False, True)
    assert config.wandb_name == "cli_numbers"  # None: the environment's own name


def test_an_environment_without_any_name_gets_its_class_name():
    assert settings(env=Unset).env_config.wandb_name == "Unset"


def test_top_level_yaml_keys(tmp_path: Path):
    config = write(tmp_path / "c.yaml", {"slurm": False, "testing": True, "max_n_completions": 3})
    resolved = settings("--config", config)
    assert (resolved.slurm, resolved.testing, resolved.max_n_completions) == (False, True, 3)
    assert settings("--config", config, "--testing", "false").testing is False


@pytest.mark.parametrize("content", ["", "# only a comment\n", "env:\n", "openai:\n"])
def test_an_empty_yaml_changes_nothing(tmp_path: Path, content: str):
    resolved = settings("--config", write(tmp_path / "c.yaml", content))
    assert resolved.env_config.group_size == 6
    assert resolved.server_configs[0].model_name == "init-model"


def test_several_servers(tmp_path: Path):
    config = write(tmp_path / "c.yaml", {"openai": [{"base_url": f"http://127.0.0.1:{port}/v1"} for port in (11, 12)]})
    for env in (CliEnv, TwoServers, Baseline):
        for command in ("serve", "process"):
            found = settings("--config", config, env=env, command=command).server_configs
            assert [server.base_url for server in found] == ["http://127.0.0.1:11/v1", "http://127.0.0.1:12/v1"]
    with pytest.raises(ConfigError, match="--openai"):
        settings("--config", config, "--openai.timeout", "3")
    with pytest.raises(ConfigError, match="--openai"):
        settings("--openai.timeout", "3", env=TwoServers)


@pytest.mark.parametrize("command", ["serve", "process", "evaluate"])
def test_a_named_server_replaces_the_search_for_servers(command: str, tmp_path: Path):
    url = "http://127.0.0.1:9/v1"
    by_flag = settings("--openai.base_url", url, env=Baseline, command=command).server_configs
    assert [(server.base_url, server.model_name) for server in by_flag] == [(url, "found")]
    by_yaml = settings(
        "--config", write(tmp_path / "c.yaml", {"openai": {"base_url": url}}), env=Baseline, command=command
    )
    assert [server.base_url for server in by_yaml.server_configs] == [url]
    assert isinstance(settings(env=Baseline, command=command).server_configs, ServerBaseline)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--env.group_sise", "8"], "did you mean '--env.group_size'"),
        (["--openai.base_ulr", "x"], "did you mean '--openai.base_url'"),
        (["--slrum", "true"], "did you mean '--slurm'"),
        (["--env.group_size", "many"], "--env.group_size many"),
        (["--env.group_size"], "--env.group_size needs a value"),
        (["--env.group_size", "1", "2"], "takes one value"),
        (["--env.max_reasoning_tokens", "5"], "max_reasoning_tokens"),
        (["--env.eval_handling", "SOMETIMES"], "STOP_TRAIN"),
        (["--config", "/nowhere.yaml"], "cannot be read"),
    ],
)
def test_wrong_flags_are_refused_with_a_hint(argv: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        settings(*argv)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"env": {"group_sise": 8}}, "did you mean 'group_size'"),
        ({"openai": {"base_ulr": "x"}}, "did you mean 'base_url'"),
        ({"openai": [{"modelname": "x"}, {}]}, "did you mean 'model_name'"),
        ({"enviroment": {}}, "unknown key"),
        ({"env": ["a"]}, "must hold a mapping"),
    ],
)
def test_wrong_yaml_is_refused_with_a_hint(tmp_path: Path, content: Any, message: str):
    with pytest.raises(ConfigError) as caught:
        settings("--config", write(tmp_path / "c.yaml", content))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"openai": {"weight": 1.0, "timeout": 5}}, "openai.weight"),
        ({"env": {"start_tok_length": 4096, "group_size": 2}}, "env.start_tok_length"),
        ({"tinker": {"lora_rank": 32}, "env": {"group_size": 2}}, "tinker"),
    ],
)
def test_a_key_of_published_files_without_effect_is_only_a_warning(
    content: Any, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    resolved = settings("--config", write(tmp_path / "c.yaml", content))
    assert f"'{key}' of the YAML file has no effect here" in caplog.text
    assert resolved.env_config.group_size == content.get("env", {}).get("group_size", settings().env_config.group_size)


def test_process_and_evaluate_change_some_defaults():
    config = settings(command="process").env_config
    assert (config.ensure_scores_are_not_same, config.include_messages) == (False, True)
    assert config.data_path_to_save_groups == "data/cli_numbers.jsonl"
    assert config.use_wandb is False  # set by config_init: respected
    assert settings(command="process", env=Unset).env_config.data_path_to_save_groups == "data/groups.jsonl"
    assert settings(command="evaluate", env=Unset).env_config.use_wandb is True
    assert settings("--env.include_messages", "false", command="process").env_config.include_messages is False
    assert settings().env_config.ensure_scores_are_not_same is True


def test_manager_flags_reach_the_servers(tiny_tokenizer_dir: Path):
    resolved = settings(
        *("--max_n_completions", "3", "--proxy_url", "http://127.0.0.1:5"),
        *("--env.tokenizer_name", str(tiny_tokenizer_dir), "--env.total_steps", "9"),
        command="process",
    )
    resolved.env_config.data_path_to_save_groups = None
    env = env_cli.build_env(CliEnv, resolved)
    assert env.server.max_n_completions == 3
    assert env.server.proxy_url == "http://127.0.0.1:5"
    assert (env.process_mode, env.n_groups_to_process, env.group_size_to_process) == (True, 9, 6)


def test_further_sections_reach_the_environment(tmp_path: Path):
    class Sectioned(CliEnv):
        cli_namespaces = {"teacher": APIServerConfig}  # noqa: RUF012 - as environments declare it

    config = write(tmp_path / "c.yaml", {"teacher": {"timeout": 4}})
    resolved = settings("--config", config, "--teacher.model_name", "big", env=Sectioned)
    assert resolved.flags["teacher.model_name"] == "big"
    assert resolved.yaml_config["teacher"] == {"timeout": 4}
    with pytest.raises(ConfigError, match="teacher"):
        settings("--teacher.model_name", "big", env=Sectioned, command="process")


def test_the_command_models_list_every_flag():
    config, servers = CliEnv.config_init()
    for make in (
        CliEnv.get_cli_serve_config_cls,
        CliEnv.get_cli_process_config_cls,
        CliEnv.get_cli_evaluate_config_cls,
    ):
        model: Any = make(config, servers)
        assert {"env.group_size", "env.topics", "openai.base_url", "slurm", "testing", "config"} <= set(
            model.model_fields
        )
        assert model.model_fields["env.group_size"].default == 6
        assert callable(model.run)


def test_help_lists_every_flag_with_its_documentation(capsys: pytest.CaptureFixture[str]):
    assert env_cli.main(CliEnv, ["--help"]) == 0
    assert "CLI for CliEnv" in capsys.readouterr().out
    for command in ("serve", "process", "evaluate"):
        assert env_cli.main(CliEnv, [command, "--help"]) == 0
        text = capsys.readouterr().out
        for name in CliConfig.model_fields:
            assert f"--env.{name} " in text
        for name in APIServerConfig.model_fields:
            assert f"--openai.{name} " in text
        assert "What to ask about." in text
        assert "(default: 6)" in text
        assert "STOP_TRAIN|LIMIT_TRAIN|NONE" in text
        assert SECRET not in text


def test_every_setting_has_documentation():
    assert [name for name, field in BaseEnvConfig.model_fields.items() if not field.description] == []


SCRIPT = """
import asyncio
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

class ScriptEnv(BaseEnv):
    name = "script"
    @classmethod
    def config_init(cls):
        return BaseEnvConfig(use_wandb=False, group_size=2), [APIServerConfig(base_url="http://127.0.0.1:1/v1", api_key="sk-very-secret")]
    async def setup(self):
        self.count = 0
    async def get_next_item(self):
        self.count += 1
        return self.count
    async def collect_trajectory(self, item):
        ids = self.tokenizer.encode(f"item {item}")
        return {"tokens": ids, "masks": ids, "scores": float(item)}, []
    async def evaluate(self, *args, **kwargs):
        await self.evaluate_log({"accuracy": 0.5}, samples=[{"q": 1}])

if __name__ == "__main__":
    ScriptEnv.cli()
"""


def run_script(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script_env.py"
    script.write_text(SCRIPT)
    return subprocess.run([sys.executable, str(script), *argv], cwd=folder, capture_output=True, text=True, timeout=120)


def test_process_as_a_program(tmp_path: Path, tiny_tokenizer_dir: Path):
    done = run_script(tmp_path, "process", "--env.total_steps", "3", "--env.tokenizer_name", str(tiny_tokenizer_dir))
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "data" / "script.jsonl").read_text().splitlines()) == 3
    assert "item 1" in (tmp_path / "data" / "script.html").read_text()
    assert SECRET not in done.stdout + done.stderr
    assert "***" in done.stderr
    assert "an inference server must be running there" in done.stderr


def test_evaluate_as_a_program(tmp_path: Path, tiny_tokenizer_dir: Path):
    done = run_script(
        tmp_path, "evaluate", "--env.data_dir_to_save_evals", "evals", "--env.tokenizer_name", str(tiny_tokenizer_dir)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "evals" / "metrics.json").read_text())["results"]["all"] == {"accuracy": 0.5}
    assert json.loads((tmp_path / "evals" / "samples.jsonl").read_text()) == {"q": 1}
    kept = yaml.safe_load((tmp_path / "evals" / "evaluate_config.yaml").read_text())
    assert kept["openai"][0]["api_key"] == "***"
    assert kept["env"]["group_size"] == 2
    assert "accuracy" in done.stdout
    assert SECRET not in done.stdout + done.stderr


def test_wrong_usage_ends_with_code_2(tmp_path: Path):
    done = run_script(tmp_path, "serve", "--env.group_sise", "8")
    assert done.returncode == 2
    assert "error: unknown flag '--env.group_sise'; did you mean '--env.group_size'?" in done.stderr
    assert env_cli.main(CliEnv, ["sreve"]) == 2
    assert env_cli.main(CliEnv, []) == 2


@pytest.mark.parametrize(
    ("command", "flag", "value", "message"),
    [
        ("process", "env.group_size", "0", "it must be 1 or more"),
        ("serve", "env.max_token_length", "-3", "it must be 1 or more"),
        ("process", "env.total_steps", "-3", "process makes that many groups, give 1 or more"),
        ("serve", "env.rollout_server_url", "nonsense", "it must look like http://host:8000"),
        ("evaluate", "openai.base_url", "localhost:9001/v1", "it must look like http://host:8000"),
    ],
)
def test_values_with_which_nothing_can_be_made_are_refused(command: str, flag: str, value: str, message: str):
    with pytest.raises(ConfigError, match=f"{flag} is '?{value}'?; {message}"):
        settings(f"--{flag}", value, command=command)


def test_a_folder_of_evaluations_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    assert env_cli.main(CliEnv, ["evaluate", "--env.data_dir_to_save_evals", str(tmp_path / "file")]) == 2
    assert "env.data_dir_to_save_evals: the folder" in capsys.readouterr().err
