"""The plan of a run: one YAML file names the model, the trainer's parameters and the environments.

    name: two-tasks
    run_dir: runs/two-tasks
    model: tiny                       # tiny | smollm2 | a folder or hub name
    trainer:                          # any GRPOConfig parameter
      max_steps: 100
      learning_rate: 1.0e-3
    environments:
      - path: examples/environments/arithmetic.py:Arithmetic     # or an installed module: package.module:Class
        weight: 2.0
        config: {group_size: 8}       # any parameter of the environment
    rollout_server: {port: 8000}
    policy_server: {url: null}        # null: the embedded engine in the trainer's process; else an OpenAI-compatible server

`load_plan` reads and checks it, `processes` turns it into what the supervisor starts. Errors name file, key and the
nearest known key.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atlaslib.errors import ConfigError, unknown_name_message
from atlaslib.launch.supervisor import ProcessSpec
from atroposlib.utils.cli import read_yaml

BUILT_IN_MODELS = frozenset({"tiny", "smollm2"})
ENDLESS = 10**9
"""Environments make groups until the supervisor stops them: the trainer knows when it has enough."""
_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class EnvironmentPlan(_Section):
    """One environment of the run."""

    path: str = Field(description="file.py:Class, or package.module:Class")
    name: str | None = Field(default=None, description="its name on the page; default: the class's")
    weight: float = Field(default=1.0, gt=0, description="share of the inference slots among the environments")
    copies: int = Field(default=1, ge=1, le=64, description="processes of this environment")
    config: dict[str, Any] = Field(default_factory=dict, description="parameters of the environment (--env.*)")
    openai: dict[str, Any] = Field(default_factory=dict, description="parameters of its inference server (--openai.*)")


class RolloutServerPlan(_Section):
    """The rollout server of the run."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0: any free port, kept for the whole run")
    durability: Literal["safe", "interval", "none"] = "safe"
    token: str | None = Field(default=None, description="bearer token; needed when host is not loopback")


class PolicyServerPlan(_Section):
    """Who samples."""

    url: str | None = Field(default=None, description="an OpenAI-compatible server; None: the embedded engine")
    port: int = Field(default=0, ge=0, le=65535, description="port of the embedded policy server; 0: any free port")
    model_name: str = "policy"
    server_type: Literal["vllm", "openai", "sglang", "trl"] = "vllm"


class RunPlan(_Section):
    """Everything one run needs."""

    name: str = "run"
    run_dir: Path = Path("runs/run")
    model: str = "tiny"
    kind: Literal["grpo", "teacher"] = Field(
        default="grpo", description="teacher: the built-in teaching example, which needs no environment"
    )
    seed: int = 0
    threads: int = Field(default=0, ge=0, description="torch threads of the trainer; 0: one for tiny models, else all")
    trainer: dict[str, Any] = Field(default_factory=dict)
    environments: list[EnvironmentPlan] = Field(default_factory=list)
    rollout_server: RolloutServerPlan = Field(default_factory=RolloutServerPlan)
    policy_server: PolicyServerPlan = Field(default_factory=PolicyServerPlan)

    @property
    def model_dir(self) -> str:
        """Where the trainer and the environments find model and tokenizer."""
        return str(self.run_dir / "model") if self.model in BUILT_IN_MODELS else self.model

    @property
    def rollout_url(self) -> str:
        """The rollout server, as the other processes reach it."""
        host = "127.0.0.1" if self.rollout_server.host in {"0.0.0.0", "::"} else self.rollout_server.host
        return f"http://{host}:{self.rollout_server.port}"

    @property
    def policy_url(self) -> str:
        """The policy server, without /v1."""
        return (self.policy_server.url or f"http://127.0.0.1:{self.policy_server.port}").rstrip("/").removesuffix("/v1")


# ---- reading ---------------------------------------------------------------------------------------------------------


def load_plan(path: Path, overrides: list[str]) -> RunPlan:
    """Read a plan file and apply ``key=value`` overrides (dotted keys)."""
    try:
        content = read_yaml(path, str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} must hold keys and values, not {type(content).__name__}; known keys: {', '.join(RunPlan.model_fields)}"
        )
    for override in overrides:
        apply_override(content, override)
    content.setdefault("name", path.stem)
    content.setdefault("run_dir", f"runs/{content['name']}")
    return make_plan(content, where=str(path))


def make_plan(content: dict[str, Any], *, where: str) -> RunPlan:
    """Check the content of a plan; an error names ``where``, the key and the nearest known one."""
    try:
        plan = RunPlan.model_validate(_with_floats(content))
        if plan.kind == "grpo" and not plan.environments:
            raise ConfigError(f"{where}: environments: at least one is needed (path: file.py:Class)")
        return plan
    except ValidationError as error:
        raise ConfigError(
            "\n".join(_sentence(where, problem, content) for problem in error.errors(include_url=False))
        ) from error


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set one ``key=value``; list positions are numbers (``environments.0.weight=2``)."""
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {override!r} is not of the form key=value")
    *path, last = key.split(".")
    place: Any = content
    for part in path:
        if isinstance(place, list):
            place = _item(place, part, key)
        else:
            if not isinstance(place.get(part), (dict, list)):
                place[part] = {}
            place = place[part]
    value = yaml.safe_load(text) if text else None
    if isinstance(place, list):
        _item(place, last, key)
        place[int(last)] = value
    else:
        place[last] = value


def _item(place: list[Any], part: str, key: str) -> Any:
    if not part.isdigit() or int(part) >= len(place):
        raise ConfigError(f"override {key!r}: {part!r} is not a position of a list of {len(place)}")
    return place[int(part)]


def _with_floats(value: Any) -> Any:
    """YAML 1.1 reads ``1e-3`` as text; everybody means the number."""
    if isinstance(value, dict):
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


def _sentence(where: str, problem: Any, content: dict[str, Any]) -> str:
    place = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        model: Any = RunPlan
        for part in place[:-1]:
            if not part.isdigit():
                model = {
                    "environments": EnvironmentPlan,
                    "rollout_server": RolloutServerPlan,
                    "policy_server": PolicyServerPlan,
                }[part]
        section = ".".join(place[:-1])
        return f"{where}: {unknown_name_message('key', place[-1], model.model_fields)}" + (
            f" (under {section})" if section else ""
        )
    got = "" if problem["type"] == "missing" else f" (got {problem['input']!r})"
    return f"{where}: {'.'.join(place)}: {problem['msg']}{got}"


# ---- checking --------------------------------------------------------------------------------------------------------


def check_plan(plan: RunPlan, *, where: str) -> None:
    """Everything the plan names exists and takes the parameters it is given."""
    check_trainer(plan, where=where)
    if (
        plan.model not in BUILT_IN_MODELS
        and ("/" not in plan.model or plan.model.startswith((".", "/")))
        and not Path(plan.model).is_dir()
    ):
        raise ConfigError(
            f"{where}: model: no folder {plan.model!r}; use 'tiny', 'smollm2', a folder or a hub name (owner/name)"
        )
    for index, environment in enumerate(plan.environments):
        command = [
            sys.executable,
            "-m",
            "atroposlib.cli.serve_env",
            environment.path,
            "check",
            "--config",
            "/dev/stdin",
        ]
        content = yaml.safe_dump(env_file_content(plan, environment, env_names(plan)[index][0]))
        result = subprocess.run(command, input=content, text=True, capture_output=True, timeout=120, check=False)
        if result.returncode != 0:
            lines = [line for line in (result.stderr or result.stdout).strip().splitlines() if line.strip()]
            raise ConfigError(
                f"{where}: environments.{index} ({environment.path}): {lines[-1].removeprefix('error: ') if lines else 'failed'}"
            )


def check_trainer(plan: RunPlan, *, where: str) -> None:
    """Every key under ``trainer`` is a GRPOConfig parameter and has a value of its type."""
    import dataclasses

    from atlaslib.trainers.grpo_config import GRPOConfig
    from atlaslib.trainers.grpo_fields import all_parameters, convert

    known = {item.name for item in dataclasses.fields(GRPOConfig) if item.init}
    parameters = all_parameters()
    for key, value in plan.trainer.items():
        if key not in known:
            raise ConfigError(f"{where}: trainer: {unknown_name_message('key', key, known)}")
        if key in parameters:
            try:
                convert(parameters[key], value)
            except ConfigError as error:
                raise ConfigError(f"{where}: trainer.{error}") from error
    for key in ("rollout_server_url", "policy_server_port", "output_dir"):
        if key in plan.trainer:
            raise ConfigError(
                f"{where}: trainer.{key} is set by the supervisor; use run_dir, rollout_server and policy_server"
            )


# ---- what is started -------------------------------------------------------------------------------------------------


def fix_ports(plan: RunPlan) -> None:
    """Replace port 0 by a free one, so that a process that is started again has the same address."""
    for section in (plan.rollout_server, plan.policy_server):
        if section.port == 0:
            section.port = free_port()


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def env_names(plan: RunPlan) -> list[list[str]]:
    """The name of every environment process, by environment; unique within the run."""
    taken: set[str] = set()
    names = []
    for environment in plan.environments:
        place, _, class_name = (
            environment.path.partition(".py:") if ".py:" in environment.path else environment.path.partition(":")
        )
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name or Path(place).stem)
        base = environment.name or re.sub(r"\W+", "_", words).lower()
        while base in taken:
            base += "_2"
        taken.add(base)
        names.append([base if environment.copies == 1 else f"{base}_{copy}" for copy in range(environment.copies)])
    return names


def env_file_content(plan: RunPlan, environment: EnvironmentPlan, name: str) -> dict[str, Any]:
    """The YAML file of one environment process: the plan's wishes over where everything is."""
    ahead = plan.trainer.get("max_batches_offpolicy")
    return {
        "env": {
            "rollout_server_url": plan.rollout_url,
            "tokenizer_name": plan.model_dir,
            "wandb_name": name,
            "inference_weight": environment.weight,
            "use_wandb": False,
            "include_messages": True,
            "total_steps": ENDLESS,
            **({"max_batches_offpolicy": ahead} if ahead is not None else {}),
            **environment.config,
        },
        "openai": {
            "base_url": plan.policy_url + "/v1",
            "model_name": plan.policy_server.model_name,
            "api_key": "unused",
            "server_type": plan.policy_server.server_type,
            "tokenizer_name": plan.model_dir,
            **environment.openai,
        },
    }


def write_files(plan: RunPlan) -> None:
    """The run's folder with the resolved plan and one file per environment process."""
    plan.run_dir.mkdir(parents=True, exist_ok=True)
    for environment, names in zip(plan.environments, env_names(plan), strict=True):
        for name in names:
            (plan.run_dir / f"env_{name}.yaml").write_text(
                yaml.safe_dump(env_file_content(plan, environment, name), sort_keys=False)
            )
    resolved = plan.run_dir / "plan.json"
    resolved.touch(mode=0o600)  # it may hold the rollout server's token
    resolved.write_text(plan.model_dump_json(indent=1))


def processes(plan: RunPlan) -> list[ProcessSpec]:
    """The processes of the run, in the order in which they start."""
    python = sys.executable
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
    if plan.rollout_server.token:
        quiet["ATROPOS_TOKEN"] = plan.rollout_server.token
    server = ProcessSpec(
        name="server",
        command=[
            python, "-m", "atroposlib.cli.run_api", "--host", plan.rollout_server.host, "--port", str(plan.rollout_server.port),
            "--data-dir", str(plan.run_dir / "server"), "--durability", plan.rollout_server.durability, "--log-level", "warning",
        ],
        env={**quiet, "ATROPOS_PAGE_TOKENIZER": plan.model_dir, "ATROPOS_RUN_NAME": plan.name},
        ready_url=plan.rollout_url + "/healthz",
    )  # fmt: skip
    trainer = ProcessSpec(
        name="trainer",
        command=[python, "-m", "atlaslib.launch.trainer_process", str(plan.run_dir / "plan.json")],
        env={**quiet, **({"OMP_NUM_THREADS": str(plan.threads)} if plan.threads else {})},
        ends_run=True,
        stop_timeout_s=60.0,
    )
    # The trainer makes a built-in model; environments load what they need meanwhile and then wait for it.
    waits = {"ATROPOS_WAIT_FOR": str(plan.run_dir / "model" / "config.json")} if plan.model in BUILT_IN_MODELS else {}
    environments = [
        ProcessSpec(
            name=name,
            command=[
                python,
                "-m",
                "atroposlib.cli.serve_env",
                environment.path,
                "serve",
                "--config",
                str(plan.run_dir / f"env_{name}.yaml"),
            ],
            env={**quiet, "OMP_NUM_THREADS": "1", **waits},
            may_finish=True,
        )
        for environment, names in zip(plan.environments, env_names(plan), strict=True)
        for name in names
    ]
    return [server, trainer, *environments]


def describe(plan: RunPlan) -> str:
    """The resolved plan, for people (`--dry-run`)."""
    shown = json.loads(plan.model_dump_json())
    if shown["rollout_server"]["token"]:
        shown["rollout_server"]["token"] = "***"
    lines = [yaml.safe_dump(shown, sort_keys=False).rstrip(), "processes:"]
    for spec in processes(plan):
        lines.append(f"  {spec.name}: {' '.join(spec.command)}")
    return "\n".join(lines)
