"""The parameters of ``GRPOConfig`` read from source text, so that a command line can list and check them without torch.

Own parameters come from ``grpo_config.py`` beside this file, inherited ones from the installed transformers' ``training_args.py``; both
are parsed, not imported, so the list is always that of what is installed.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from atlaslib.errors import ConfigError, MissingExtraError

OWN_FILE = Path(__file__).with_name("grpo_config.py")
NONE_IS_A_VALUE = {"report_to", "scale_rewards"}
"""Parameters for which the text 'none' is a choice of its own; for all others it means that nothing is given"""


@dataclass(kw_only=True, slots=True, frozen=True)
class Parameter:
    """One parameter as its source states it."""

    name: str
    type_text: str
    default_text: str
    documentation: str
    inherited: bool


@cache
def all_parameters() -> dict[str, Parameter]:
    """Own parameters first, then the inherited ones they do not replace."""
    own = {p.name: p for p in read_class(OWN_FILE, "GRPOConfig", inherited=False)}
    inherited = {
        p.name: p for p in read_class(training_args_file(), "TrainingArguments", inherited=True) if p.name not in own
    }
    return {**own, **inherited}


def training_args_file() -> Path:
    """The file of the installed transformers; found without importing it."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise MissingExtraError("training", package="transformers", extra="train")
    return Path(spec.origin).with_name("training_args.py")


def read_class(path: Path, class_name: str, *, inherited: bool) -> list[Parameter]:
    """The annotated fields of a dataclass in a source file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return [p for p in (_parameter(item, inherited) for item in node.body) if p is not None]
    raise ConfigError(f"{path} has no class {class_name}")


def _parameter(node: ast.stmt, inherited: bool) -> Parameter | None:
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
        return None
    type_text = ast.unparse(node.annotation)
    if type_text.startswith("ClassVar"):
        return None
    default, documentation = _default_and_documentation(node.value)
    return Parameter(
        name=node.target.id, type_text=type_text, default_text=default, documentation=documentation, inherited=inherited
    )


def _default_and_documentation(value: ast.expr) -> tuple[str, str]:
    if not isinstance(value, ast.Call):
        return ast.unparse(value), ""
    function = ast.unparse(value.func)
    if function == "parameter":
        return ast.unparse(value.args[0]), str(_constant(value.args[1]))
    default, documentation = "None", ""
    for keyword in value.keywords:
        if keyword.arg in {"default", "default_factory"}:
            default = ast.unparse(keyword.value)
        if keyword.arg == "metadata" and isinstance(keyword.value, ast.Dict):
            for key, item in zip(keyword.value.keys, keyword.value.values, strict=True):
                if key is not None and _constant(key) == "help":
                    documentation = str(_constant(item))
    return default, " ".join(documentation.replace("%%", "%").split())


def _constant(node: ast.expr) -> object:
    try:
        value: object = ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
    return value


def convert(parameter: Parameter, value: Any) -> Any:
    """``value`` as the type the parameter declares; a value that cannot be one is an error that names both."""
    kind = parameter.type_text
    absent = {"null", ""} if parameter.name in NONE_IS_A_VALUE else {"none", "null", ""}
    if isinstance(value, str) and value.lower() in absent and "None" in kind:
        return None
    loaded = read_value(value)
    if "list" in kind and isinstance(loaded, str) and "str" in kind:
        return [part.strip() for part in loaded.split(",")] if "," in loaded else loaded
    if "list" in kind and isinstance(value, str) and "," in value and not isinstance(loaded, list):
        return [read_value(part.strip()) for part in value.split(",")]
    if _fits(loaded, kind):
        return loaded
    if "str" in kind or "Enum" in kind or "Strategy" in kind or "Names" in kind or "Type" in kind:
        return str(value)
    raise ConfigError(f"{parameter.name}={value!r}: expected {kind}")


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return "bool" in kind
    if isinstance(value, int):
        return "int" in kind or "float" in kind
    if isinstance(value, float):
        return "float" in kind
    if isinstance(value, list):
        return "list" in kind
    if isinstance(value, dict):
        return "dict" in kind
    return value is None and "None" in kind


def read_value(value: Any) -> Any:
    """Text as YAML would read it, with 1e-5 as a number too."""
    if not isinstance(value, str):
        return value
    try:
        loaded = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    if isinstance(loaded, str):
        try:
            return float(loaded)
        except ValueError:
            return loaded
    return loaded
