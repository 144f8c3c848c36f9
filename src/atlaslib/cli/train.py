"""``atropos train``: any parameter from the command line, as ``key=value`` or ``--key value``, or from YAML files.

Everything is read and checked before torch is imported: ``--help`` and a misspelt key answer at once.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

from atlaslib.errors import ConfigError, unknown_name_message
from atlaslib.trainers.grpo_fields import all_parameters, convert, read_value
from atroposlib.utils.cli import read_yaml

RUN_KEYS: dict[str, str] = {
    "config": "YAML file(s) with parameters; later ones and the command line win. A bare FILE.yaml does the same.",
    "trainer": "grpo (default), teacher, gkd or sft.",
    "train_dataset": "Prompts: FILE.jsonl / .json / .csv, module:function that returns rows, or a hub data set NAME or NAME:SPLIT.",
    "eval_dataset": "The same, for evaluation.",
    "reward_funcs": "Rewards, comma-separated: names of registered rewards, module:function, or sequence-classification models.",
    "peft": "LoRA settings as peft.r=8, peft.lora_alpha=16, peft.target_modules=[q_proj,v_proj], ...",
    "student_model": "trainer=teacher: the student (folder, hub id or endpoint URL).",
    "teacher_model": "trainer=gkd: the teacher (folder or hub id).",
    "trainer_kwargs": "Further arguments of the trainer's constructor as trainer_kwargs.NAME=VALUE.",
    "resume": "auto (default: the newest complete checkpoint if there is one), true (it must be there), false, or a checkpoint folder.",
    "save_final_model": "Folder for the trained model; default OUTPUT_DIR/final_model, 'none' = not saved.",
}
TRAINERS = {
    "grpo": "atlaslib.trainers.grpo:GRPOTrainer",
    "teacher": "atlaslib.trainers.teacher_trainers:TeacherGRPOTrainer",
    "gkd": "atlaslib.trainers.gkd:GKDTrainer",
    "sft": "atlaslib.trainers.sft:SFTTrainer",
}
NESTED = {"peft", "trainer_kwargs"}

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Parse, then train."""
    if any(word in {"-h", "--help", "help"} for word in argv):
        print(help_text())
        return 0
    # What the trainer waits for, and where its model is, are messages of this level; of several processes the first says them.
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = parse(argv)
    run = {key: settings.pop(key) for key in list(settings) if key in RUN_KEYS}
    return train(settings, run)


def help_text() -> str:
    """All keys with type, default and documentation."""
    lines = [
        "usage: atropos train [FILE.yaml ...] [key=value | --key value] ...",
        "",
        "example: atropos train model_name_or_path=my/model train_dataset=prompts.jsonl reward_funcs=accuracy num_generations=8",
        "",
        "What to run:",
    ]
    lines += [_entry(f"{name}=...", text) for name, text in RUN_KEYS.items()]
    for title, inherited in (
        ("Parameters of GRPOConfig:", False),
        ("Inherited from transformers.TrainingArguments:", True),
    ):
        lines += ["", title]
        for parameter in all_parameters().values():
            if parameter.inherited == inherited:
                head = f"{parameter.name}={parameter.default_text} ({parameter.type_text})"
                lines.append(_entry(head, parameter.documentation))
    return "\n".join(lines)


def _entry(head: str, text: str) -> str:
    body = textwrap.fill(text, 116, initial_indent="      ", subsequent_indent="      ") if text else ""
    return f"  {head}" + (f"\n{body}" if body else "")


def parse(argv: list[str]) -> dict[str, Any]:
    """All settings of the files and the command line; an unknown key is an error with the nearest known name."""
    pairs = list(_pairs(argv))
    settings: dict[str, Any] = {}
    for key, value in pairs:
        if key == "config":
            for name in str(value).split(","):
                _merge(settings, load_yaml(Path(name)))
    for key, value in pairs:
        if key != "config":
            _set(settings, key, value)
    return settings


def _pairs(argv: list[str]) -> list[tuple[str, str]]:
    """The words as (key, text) pairs; a flag without a value is true."""
    pairs: list[tuple[str, str]] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        bare = word.removeprefix("--")
        key, equals, value = bare.partition("=")
        if equals:
            pairs.append((key, value))
        elif not word.startswith("--"):
            if Path(word).suffix not in {".yaml", ".yml"}:
                raise ConfigError(f"cannot read {word!r}; parameters look like key=value or --key value")
            pairs.append(("config", word))
        elif (
            words and not words[0].startswith("--") and ("=" not in words[0] or not _is_key(words[0].partition("=")[0]))
        ):
            pairs.append((key, words.pop(0)))
        else:
            pairs.append((key, "true"))
    return [(key.replace("-", "_"), value) for key, value in pairs]


def _is_key(text: str) -> bool:
    name = text.split(".")[0]
    return name in RUN_KEYS or name in all_parameters()


def load_yaml(path: Path) -> dict[str, Any]:
    """Parameters of a YAML file; nested tables are allowed where a parameter is a table."""
    if not path.is_file():
        raise ConfigError(f"configuration file {path} does not exist")
    content = read_yaml(path, f"configuration file {path}") or {}
    if not isinstance(content, dict):
        raise ConfigError(f"configuration file {path} must hold key: value lines")
    settings: dict[str, Any] = {}
    for key, value in content.items():
        _set(settings, str(key), value)
    return settings


def _merge(settings: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(settings.get(key), dict):
            settings[key].update(value)
        else:
            settings[key] = value


def _set(settings: dict[str, Any], key: str, value: Any) -> None:
    """Put one value where it belongs, converted to the parameter's type; dots reach into tables."""
    name, *path = key.split(".")
    known = all_parameters()
    if name not in known and name not in RUN_KEYS:
        raise ConfigError(unknown_name_message("parameter", name, [*known, *RUN_KEYS]))
    if path:
        table_like = name in NESTED or "dict" in known[name].type_text if name in known or name in NESTED else False
        if not table_like:
            raise ConfigError(f"{key}: {name} is not a table; write {name}=VALUE")
        table = settings.setdefault(name, {})
        for part in path[:-1]:
            table = table.setdefault(part, {})
        table[path[-1]] = read_value(value)
    elif name in known:
        settings[name] = convert(known[name], value)
    else:
        settings[name] = read_value(value) if name in NESTED else value


def train(settings: dict[str, Any], run: dict[str, Any]) -> int:
    """Build the trainer and run it."""
    name = run.get("trainer", "grpo")
    if name not in TRAINERS:
        raise ConfigError(unknown_name_message("trainer", str(name), TRAINERS))
    from atlaslib.launch.folder_lock import hold_folder
    from atlaslib.models.loading import resolve_model_path
    from atlaslib.trainers.grpo_config import GRPOConfig

    settings.setdefault("output_dir", "atropos_train")
    for table, key in ((settings, "model_name_or_path"), (run, "student_model"), (run, "teacher_model")):
        if isinstance(table.get(key), str):
            table[key] = resolve_model_path(table[key])
    config = GRPOConfig(**settings)
    arguments = _trainer_arguments(name, run, config)
    # Two runs in one folder would take and delete each other's checkpoints; of several processes the first writes them.
    first = config.process_index == 0
    with hold_folder(Path(config.output_dir), "output_dir") if first else contextlib.nullcontext():
        trainer = load_object(TRAINERS[name])(args=config, **arguments)
        try:
            _train(trainer, config, run)
        except KeyboardInterrupt:
            _say_stopped(trainer.state.global_step, config.output_dir)
            raise
    return 0


def _train(trainer: Any, config: Any, run: dict[str, Any]) -> None:
    from atlaslib.trainers.run_state import find_checkpoint

    resume = run.get("resume", "auto")
    wish = {"true": True, "false": None}.get(str(resume).lower(), resume)
    checkpoint = find_checkpoint(wish, config.output_dir)
    if checkpoint is not None:
        logger.info("going on from %s (resume=false starts anew)", checkpoint)
    trainer.train(resume_from_checkpoint=checkpoint)
    target = run.get("save_final_model") or str(Path(config.output_dir) / "final_model")
    if str(target).lower() not in {"none", "false"}:
        trainer.save_model(target)
        logger.info("%d steps done; the model is in %s", trainer.state.global_step, target)
    if trainer.accelerator.num_processes > 1:
        # together: one that aborts while it ends would take down one that still writes
        trainer.accelerator.wait_for_everyone()
        trainer.accelerator.end_training()


def _say_stopped(step: int, output_dir: str) -> None:
    from atlaslib.trainers.run_state import newest_complete

    found = newest_complete(Path(output_dir))
    if found is None:
        logger.info("stopped after %d steps; there is no checkpoint yet (save_steps sets how often one is made)", step)
    else:
        logger.info(
            "stopped after %d steps; the newest checkpoint is %s (resume=auto, the default, goes on from it)",
            step,
            found,
        )


def _trainer_arguments(name: str, run: dict[str, Any], config: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = dict(run.get("trainer_kwargs") or {})
    for key in ("train_dataset", "eval_dataset"):
        if run.get(key) is not None:
            arguments[key] = load_rows(run[key])
    if run.get("reward_funcs") is not None:
        if name == "gkd":
            raise ConfigError("trainer=gkd takes its reward from teacher_model; leave reward_funcs out")
        given = run["reward_funcs"]
        arguments["reward_funcs"] = [
            load_reward(part) for part in (given if isinstance(given, list) else str(given).split(","))
        ]
    if run.get("peft"):
        arguments["peft_config"] = _lora(run["peft"])
    for key, owner in (("student_model", "teacher"), ("teacher_model", "gkd")):
        if run.get(key) is not None:
            if name != owner:
                raise ConfigError(f"{key} belongs to trainer={owner}, not to trainer={name}")
            arguments[key] = run[key]
    if name == "gkd" and "teacher_model" not in arguments:
        raise ConfigError("trainer=gkd needs a teacher; give teacher_model=FOLDER or a hub id")
    _check_names(run.get("trainer_kwargs") or {}, load_object(TRAINERS[name]))
    return arguments


def _check_names(given: dict[str, Any], trainer: type) -> None:
    known = {name for cls in trainer.__mro__[:-1] for name in inspect.signature(cls).parameters}
    for name in given:
        if name not in known:
            raise ConfigError(
                unknown_name_message("argument of the trainer", f"trainer_kwargs.{name}", _prefixed(known))
            )


def _prefixed(names: set[str]) -> list[str]:
    return [f"trainer_kwargs.{name}" for name in names - {"self", "args", "kwargs", "positional"}]


def _lora(settings: dict[str, Any]) -> Any:
    from peft import LoraConfig

    try:
        return LoraConfig(**{"task_type": "CAUSAL_LM", **settings})
    except TypeError as error:
        raise ConfigError(f"peft: {error}") from error


def load_object(path: str) -> Any:
    """``module:name`` to the object; modules are also found in the present folder."""
    module_name, _, attribute = path.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load {path!r}: {error}") from error


def load_reward(text: Any) -> Any:
    """``module:function`` to the function; anything else is a name the trainer resolves."""
    name = str(text).strip()
    return load_object(name) if ":" in name and not name.startswith("http") else name


def load_rows(source: Any) -> Any:
    """Rows of a file, a function or a hub data set."""
    if not isinstance(source, str):
        return source
    path = Path(source)
    if path.suffix in {".jsonl", ".json", ".csv"}:
        return read_rows(path)
    if ":" in source and importlib.util.find_spec(source.split(":")[0].split(".")[0]) is not None:
        rows = load_object(source)
        return rows() if callable(rows) else rows
    from atlaslib.data.hub import load_hub_rows

    return load_hub_rows(source)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL, JSON or CSV file."""
    if not path.is_file():
        raise ConfigError(f"data file {path} does not exist")
    if path.suffix == ".csv":
        import csv

        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data file {path} is not text ({error}); give JSONL, JSON or CSV") from error
    if path.suffix == ".json":
        rows = _parsed(text, str(path))
    else:
        numbered = enumerate(text.split("\n"), start=1)  # not splitlines(): JSON strings may hold its other line ends
        rows = [_parsed(line, f"{path}, line {number}") for number, line in numbered if line.strip()]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f'data file {path} must hold a list of rows, each an object such as {{"prompt": ...}}')
    return rows


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"data file {where} is not valid JSON ({error}): {text[:80]!r}") from error


if __name__ == "__main__":
    from atroposlib.cli.main import main as atropos

    sys.exit(atropos(["train", *sys.argv[1:]]))
