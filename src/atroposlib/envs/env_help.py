"""``--help`` of an environment's commands: every flag with type, default and documentation."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from atroposlib.envs.env_cli import COMMANDS, command_overlay, flag_fields
from atroposlib.utils import cli

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

WIDTH = 118


def overview(env_cls: type[BaseEnv]) -> str:
    """The three commands."""
    lines = [
        f"CLI for {env_cls.__name__}",
        "",
        "usage: COMMAND [--env.FIELD VALUE] [--openai.FIELD VALUE] [--config FILE.yaml]",
        "",
    ]
    lines += [f"  {name:<9} {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "COMMAND --help lists every flag."])


def command_help(env_cls: type[BaseEnv], command: str) -> str:
    """All flags of one command, with the defaults this environment's ``config_init`` gives."""
    env_config, servers = env_cls.config_init()
    shown = cli.with_overrides(env_config, command_overlay(env_cls, command, env_config))
    first = (servers[0] if servers else None) if isinstance(servers, list | tuple) else servers
    lines = [f"CLI for {env_cls.__name__}: {command}", textwrap.fill(COMMANDS[command], WIDTH), ""]
    lines += _entry(
        "config",
        "path",
        None,
        "YAML file with the sections env: and openai: (a list for several servers); flags win over it.",
    )
    for name, (model, field_name) in flag_fields(env_cls, command, env_config).items():
        field = model.model_fields[field_name]
        source = shown if name.startswith("env.") else first if name.startswith("openai.") else None
        default = getattr(source, field_name, field.get_default(call_default_factory=True))
        lines += _entry(
            name,
            type_name(field.annotation),
            cli.MASK if default and cli.is_secret(name) else default,
            field.description or "",
        )
    return "\n".join(lines)


def _entry(name: str, kind: str, default: Any, text: str) -> list[str]:
    value = getattr(default, "value", default)
    head = f"  --{name} {kind.upper()}"
    return [
        head,
        textwrap.fill(f"{text} (default: {value})".strip(), WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8),
    ]


def type_name(annotation: Any) -> str:
    """A short name: ``int``, ``str | None``, the members of an enumeration."""
    members = getattr(annotation, "__members__", None)
    if members:
        return "|".join(str(member.value) for member in members.values())
    if isinstance(annotation, type) and not getattr(annotation, "__args__", None):
        return annotation.__name__
    return str(annotation).replace("typing.", "")
