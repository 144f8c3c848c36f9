"""Writes the reference pages from the code: ``python docs/reference/generate.py`` (``--check`` only compares)."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def type_name(annotation: Any) -> str:
    text = getattr(annotation, "__name__", None) if isinstance(annotation, type) else None
    return text or str(annotation).replace("typing.", "")


def model_table(model: Any) -> str:
    rows = ["| parameter | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else field.get_default(call_default_factory=True)
        shown = default.value if hasattr(default, "value") else default
        rows.append(
            f"| `{name}` | {cell(type_name(field.annotation))} | `{cell(repr(shown))}` | {cell(field.description or '')} |"
        )
    return "\n".join(rows)


def environments_page() -> str:
    from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, ServerBaseline, ServerManagerConfig

    parts = [
        "# Environment parameters",
        "",
        "Flags: `--env.NAME VALUE`, `--openai.NAME VALUE`, `--slurm`, `--testing`; YAML: `env:`, `openai:`.",
    ]
    for title, model in (
        ("BaseEnvConfig (`--env.*`)", BaseEnvConfig),
        ("APIServerConfig (`--openai.*`; `OpenaiConfig` is the same class)", APIServerConfig),
        ("ServerBaseline", ServerBaseline),
        ("ServerManagerConfig", ServerManagerConfig),
    ):
        parts += ["", f"## {title}", "", model_table(model)]
    return "\n".join(parts) + "\n"


def grpo_page() -> str:
    from transformers import TrainingArguments

    from atlaslib.trainers.grpo_config import GRPOConfig

    inherited = {field.name for field in fields(TrainingArguments)}
    own = GRPOConfig.__annotations__
    rows = ["| parameter | default | meaning |", "|---|---|---|"]
    for field in fields(GRPOConfig):
        if field.name not in own:
            continue
        default = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
        note = " *(inherited, default changed)*" if field.name in inherited else ""
        rows.append(f"| `{field.name}` | `{cell(repr(default))}` | {cell(field.metadata.get('help', ''))}{note} |")
    head = (
        "# GRPOConfig\n\nExtends `transformers.TrainingArguments`: every parameter of that class works too. "
        "On the command line: `key=value`, `--key value`, or a YAML file.\n\n"
    )
    return head + "\n".join(rows) + "\n"


def metrics_page() -> str:
    from atlaslib.trainers.metric_names import METRICS

    rows = [f"| `{name}` | {cell(meaning)} |" for name, meaning in METRICS.items()]
    head = (
        "# Metrics\n\nEvery step's numbers, in `metrics.jsonl`, the trackers and on the live page. "
        "Shares lie between 0 and 1; seconds end in `_s`.\n\n| metric | meaning |\n|---|---|\n"
    )
    return head + "\n".join(rows) + "\n"


def help_text(command: Any) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        command(["--help"])
    return shown.getvalue().rstrip()


OTHER_COMMANDS = {
    "atropos-sft-gen": "atroposlib.cli.sft:main",
    "atropos-dpo-gen": "atroposlib.cli.dpo:main",
    "view-run": "atroposlib.cli.view_run:main",
    "inference-node-wandb-watcher": "atroposlib.cli.inference_node_wandb_watcher:main",
}


def commands_page() -> str:
    from atroposlib.cli.main import COMMANDS, load, overview

    others = "With names of their own: `run-api` (the same as `atropos api`), `view-run-multimodal` (`view-run` with pictures), "
    others += ", ".join(f"[`{name}`](#{name})" for name in OTHER_COMMANDS) + "."
    parts = ["# Commands", "", "```text", overview(), "```", "", others]
    for name, command in COMMANDS.items():
        if name == "train":
            parts += [
                "",
                f"## atropos {name}",
                "",
                "Every parameter of [GRPOConfig](grpo_config.md), and what `atropos train --help` lists first.",
            ]
            continue
        parts += ["", f"## atropos {name}", "", "```text", help_text(load(command.target)), "```"]
    for name, target in OTHER_COMMANDS.items():
        parts += ["", f"## {name}", "", "```text", help_text(load(target)), "```"]
    return "\n".join(parts) + "\n"


def http_page() -> str:
    from atlaslib.engine.server import create_app as policy_app
    from atroposlib.api.server import app as rollout_app

    class NoEngine:
        engine = None

    from atroposlib.testing.tiny_tokenizer import build_tiny_tokenizer

    policy = policy_app(NoEngine(), build_tiny_tokenizer())  # type: ignore[arg-type]
    parts = [
        "# HTTP routes",
        "",
        "Both servers show an interactive page of their routes at `/docs`; the live page of the rollout server is at `/live`.",
    ]
    for title, app in (("Rollout server", rollout_app), ("Policy server", policy)):
        parts += ["", f"## {title}", "", "| method | path | |", "|---|---|---|"]
        for path, methods in sorted(app.openapi()["paths"].items()):
            for method, operation in methods.items():
                meaning = operation.get("description") or operation.get("summary", "")
                parts.append(f"| {method.upper()} | `{path}` | {cell(meaning.split(chr(10) * 2)[0])} |")
    return "\n".join(parts) + "\n"


PAGES = {
    "environments.md": environments_page,
    "grpo_config.md": grpo_page,
    "metrics.md": metrics_page,
    "commands.md": commands_page,
    "http.md": http_page,
}


def main(argv: list[str]) -> int:
    import os

    os.environ["COLUMNS"] = "100"
    sys.executable = "python"  # some defaults name it; the pages must not depend on where they are made
    stale = []
    for name, make in PAGES.items():
        path, text = HERE / name, make()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in argv:
                path.write_text(text)
    if "--check" in argv and stale:
        sys.stderr.write(f"out of date: {', '.join(stale)}; run python docs/reference/generate.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
