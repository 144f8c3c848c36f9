"""Flags with sections (``--env.group_size 8``) made from pydantic models, and their merging with YAML.

Flags are read here rather than by argparse, because values may be negative numbers, lists or ``None`` and because an
unknown flag must be answered with the nearest known one. Secrets never leave this module readable.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo

from atroposlib.errors import ConfigError, unknown_name_message

SECRET_WORDS = ("api_key", "apikey", "secret", "password", "token_value", "auth_token")
MASK = "***"


# ---------------------------------------------------------------------- reading flags


def scan_flags(argv: Sequence[str]) -> dict[str, list[str]]:
    """Split ``--key value ...`` and ``--key=value`` into raw values per key; -1 is a value, not a flag.

    Example: ``scan_flags(["--env.total_steps", "-1", "--slurm=false"])``
    """
    flags: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            current = [value] if equals else []
            flags[key] = current
        elif current is None:
            raise ConfigError(f"unexpected argument {word!r}; flags look like --env.group_size 8")
        else:
            current.append(word)
    return flags


def get_double_dash_flags(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The flags of the process as plain values: ``None`` for the text None, True for a bare flag, a list for several values."""
    words = list(sys.argv[1:] if argv is None else argv)
    first = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    values: dict[str, Any] = {}
    for key, raw in scan_flags(words[first:]).items():
        plain = [None if value == "None" else value for value in raw]
        values[key] = True if not plain else plain[0] if len(plain) == 1 else plain
    return values


def convert_flag(name: str, annotation: Any, raw: list[str]) -> Any:
    """Read the raw words of one flag as a value of type ``annotation``."""
    options = _union_members(annotation)
    if raw in (["None"], ["null"]) and type(None) in options:
        return None
    if not raw:
        if bool in options:
            return True
        if not any(_is_collection(option) for option in options):
            raise ConfigError(f"--{name} needs a value")
    errors: list[str] = []
    for candidate in _candidates(options, raw, name):
        try:
            return TypeAdapter(annotation).validate_python(candidate)
        except ValidationError as error:
            errors.append(error.errors()[0]["msg"])
    raise ConfigError(f"--{name} {' '.join(raw)}: {errors[0] if errors else 'cannot be read'}")


def _candidates(options: tuple[Any, ...], raw: list[str], name: str) -> Iterable[Any]:
    """What the words may mean, most literal first."""
    if any(_is_collection(option) for option in options):
        if len(raw) == 1 and raw[0][:1] in "[{":
            yield _yaml_value(raw[0])
        yield raw
        if len(raw) == 1:
            yield _yaml_value(raw[0])
            yield raw[0].split(",")
        return
    if len(raw) > 1:
        raise ConfigError(f"--{name} takes one value, got {len(raw)}: {' '.join(raw)}")
    yield raw[0]
    yield _yaml_value(raw[0])


def _yaml_value(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _union_members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _is_collection(annotation: Any) -> bool:
    origin = get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, list | tuple | set | frozenset | dict | BaseModel)


# ---------------------------------------------------------------------- merging


def merge_dicts(*dicts: Mapping[str, Any] | None) -> dict[str, Any]:
    """Merge left to right, nested mappings too; the later value wins."""
    merged: dict[str, Any] = {}
    for source in dicts:
        for key, value in (source or {}).items():
            if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
                merged[key] = merge_dicts(merged[key], value)
            else:
                merged[key] = value
    return merged


def extract_namespace(model: BaseModel | Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries whose name begins with ``prefix``, without it."""
    values = model.model_dump() if isinstance(model, BaseModel) else model
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def with_overrides(model: BaseModel, overrides: Mapping[str, Any]) -> Any:
    """A new model of the same class with some fields changed and everything validated again."""
    values: dict[str, Any] = {name: getattr(model, name) for name in type(model).model_fields}
    for name, value in overrides.items():
        present = values.get(name)
        if isinstance(value, Mapping) and isinstance(present, BaseModel | Mapping):
            base = present.model_dump() if isinstance(present, BaseModel) else present
            value = merge_dicts(base, value)
        values[name] = value
    try:
        return type(model)(**values)
    except ValidationError as error:
        raise ConfigError(validation_message(error)) from error


def validation_message(error: ValidationError) -> str:
    """One line per wrong field: name, value, what is wrong."""
    return "; ".join(
        f"{'.'.join(map(str, entry['loc']))} = {_shown(entry['loc'], entry['input'])}: {entry['msg']}"
        for entry in error.errors()
    )


def _shown(location: tuple[int | str, ...], value: Any) -> str:
    return MASK if any(is_secret(str(part)) for part in location) else repr(value)


def read_yaml(path: str | Path, shown: str) -> Any:
    """What a YAML file holds; an error calls it ``shown``. A file that cannot be read is the caller's to explain."""
    import yaml

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown} is not valid YAML: {error}") from error


def load_yaml(path: str) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping."""
    try:
        content = read_yaml(path, f"--config {path}")
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {path}: the file must hold a mapping with sections such as 'env:', not {type(content).__name__}"
        )
    return content


def make_folder(folder: str | Path, setting: str) -> Path:
    """Create the folder that ``setting`` names; one that cannot be is a wrong setting."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "a file of that name exists" if isinstance(error, FileExistsError) else error.strerror or str(error)
        raise ConfigError(f"{setting}: the folder {str(path)!r} cannot be made ({reason}); name another one") from error
    return path


def check_url(url: str, setting: str) -> None:
    """Refuse what is not ``http://host`` or ``https://host``: nothing would ever answer there."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:  # a port that is no number, or an address that is none
        is_address = False
    if not is_address:
        raise ConfigError(f"{setting} is {url!r}; it must look like http://host:8000")


def check_keys(given: Iterable[str], known: Iterable[str], kind: str) -> None:
    """Refuse a name that nobody knows, with the nearest one that exists."""
    names = list(known)
    for key in given:
        if key not in names:
            raise ConfigError(unknown_name_message(kind, key, names))


# ---------------------------------------------------------------------- models


def get_prefixed_pydantic_model(base_model: type[BaseModel], prefix: str) -> type[BaseModel]:
    """The same fields with ``prefix`` before each name."""
    fields: dict[str, Any] = {
        f"{prefix}{name}": (field.annotation, _plain_field(field)) for name, field in base_model.model_fields.items()
    }
    return create_model(f"{prefix.rstrip('._').capitalize()}{base_model.__name__}", **fields)


def adjust_model_defaults(model_class: type[BaseModel], defaults: BaseModel | Mapping[str, Any]) -> type[BaseModel]:
    """A subclass ``<Name>WithDefaults`` whose defaults are those of ``defaults``."""
    values = defaults.model_dump() if isinstance(defaults, BaseModel) else defaults
    fields: dict[str, Any] = {
        name: (field.annotation, _plain_field(field, default=values[name]))
        for name, field in model_class.model_fields.items()
        if name in values
    }
    return create_model(f"{model_class.__name__}WithDefaults", __base__=model_class, **fields)


def _plain_field(field: FieldInfo, **changes: Any) -> Any:
    from pydantic import Field

    if "default" not in changes:
        changes["default"] = field.get_default(call_default_factory=True) if not field.is_required() else ...
    return Field(description=field.description, **changes)


def is_secret(name: str) -> bool:
    """True for a field whose value must not be shown."""
    return any(word in name.lower() for word in SECRET_WORDS)


def mask_secrets(value: Any) -> Any:
    """A copy for printing or writing: every non-empty secret becomes ``***``."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: MASK if is_secret(str(key)) and entry else mask_secrets(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [mask_secrets(entry) for entry in value]
    return value
