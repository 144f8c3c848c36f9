"""The command line of an environment: ``python my_env.py serve | process | evaluate``.

One builder for the three commands. A value comes from, strongest first: a flag (``--env.group_size 8``), the YAML file
(``--config run.yaml``), ``config_init`` of the environment, the default of its config class. An unknown flag or
key is an error that names the nearest known one; exit code 2. API keys are never printed or written.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError, create_model

from atroposlib.envs.constants import ENV_NAMESPACE, NAMESPACE_SEP, OPENAI_NAMESPACE
from atroposlib.envs.env_config import BaseEnvConfig
from atroposlib.envs.server_handling.openai_server import resolve_openai_configs
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManagerConfig
from atroposlib.errors import AtroposError, ConfigError, unknown_name_message
from atroposlib.utils import cli
from atroposlib.utils.closed_pipe import ends_with_its_reader

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

logger = logging.getLogger(__name__)

COMMANDS = {
    "serve": "make groups for a trainer, through the rollout server",
    "process": "make a number of groups and write them to a file, with a page to read them",
    "evaluate": "evaluate once and write metrics and samples",
}
LEGACY_KEYS = {"": frozenset({"tinker"}), ENV_NAMESPACE: frozenset({"start_tok_length"})}
LEGACY_SERVER_KEYS = frozenset({"weight"})
"""Keys of published YAML files without effect here (``tinker``: another trainer's section): ignored with a warning."""
LOCAL_HOSTS = ("localhost", "0.0.0.0", "127.0.0.1")


@dataclass(kw_only=True, slots=True)
class RunSettings:
    """Everything one run of an environment needs, resolved."""

    command: str
    env_config: BaseEnvConfig
    server_configs: Any
    slurm: bool = False
    testing: bool = False
    max_n_completions: int | None = None
    """None: not asked for, the server manager's default holds."""
    proxy_url: str | None = None
    yaml_config: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    """Converted flags by full name, e.g. ``{"env.group_size": 8}``."""


# ---------------------------------------------------------------------- the table of flags


def flag_fields(
    env_cls: type[BaseEnv], command: str, env_config: BaseEnvConfig
) -> dict[str, tuple[type[BaseModel], str]]:
    """Every flag of a command: full name -> (model, field)."""
    sections: dict[str, type[BaseModel]] = {ENV_NAMESPACE: type(env_config), OPENAI_NAMESPACE: APIServerConfig}
    if command == "serve":
        sections.update(env_cls.cli_namespaces)
    table = {
        f"{section}{NAMESPACE_SEP}{name}": (model, name)
        for section, model in sections.items()
        for name in model.model_fields
    }
    table.update({name: (ServerManagerConfig, name) for name in ServerManagerConfig.model_fields})
    return table


def read_flags(argv: Sequence[str], table: Mapping[str, tuple[type[BaseModel], str]]) -> dict[str, Any]:
    """Scan and convert the flags; ``config`` stays a path."""
    values: dict[str, Any] = {}
    for name, raw in cli.scan_flags(argv).items():
        known = name if name in table or name == "config" else name.replace("-", "_")
        if known == "config":
            values["config"] = cli.convert_flag("config", str | None, raw)
        elif known in table:
            model, field_name = table[known]
            values[known] = cli.convert_flag(known, model.model_fields[field_name].annotation, raw)
        else:
            raise ConfigError(unknown_name_message("flag", f"--{name}", [f"--{key}" for key in (*table, "config")]))
    return values


def check_yaml(yaml_config: dict[str, Any], env_cls: type[BaseEnv], env_config: BaseEnvConfig) -> None:
    """Refuse unknown sections and keys."""
    sections: dict[str, type[BaseModel]] = {
        ENV_NAMESPACE: type(env_config),
        OPENAI_NAMESPACE: APIServerConfig,
        **env_cls.cli_namespaces,
    }
    top = [*sections, *ServerManagerConfig.model_fields]
    cli.check_keys(_without_legacy(yaml_config, "", top), top, "key in the YAML file")
    for section, model in sections.items():
        content = yaml_config.get(section)
        for entry in content if isinstance(content, list) else [content or {}]:
            if not isinstance(entry, Mapping):
                raise ConfigError(f"section '{section}:' of the YAML file must hold a mapping, not {entry!r}")
            keys = _without_legacy(entry, section, model.model_fields)
            cli.check_keys(keys, model.model_fields, f"key under '{section}:' in the YAML file,")


def _without_legacy(keys: Iterable[str], section: str, known: Iterable[str]) -> set[str]:
    """The keys of a section that should be known; those of published files that have no effect are named and dropped."""
    legacy = set(keys) & LEGACY_KEYS.get(section, LEGACY_SERVER_KEYS) - set(known)
    for key in sorted(legacy):
        place = f"{section}.{key}" if section else key
        logger.warning("'%s' of the YAML file has no effect here and is ignored", place)
    return set(keys) - legacy


# ---------------------------------------------------------------------- resolving


def command_overlay(env_cls: type[BaseEnv], command: str, env_config: BaseEnvConfig) -> dict[str, Any]:
    """What a command changes in ``config_init``'s values before YAML and flags are applied."""
    overlay: dict[str, Any] = {}
    if command in ("process", "evaluate") and "use_wandb" not in env_config.model_fields_set:
        overlay["use_wandb"] = True
    if command == "process":
        overlay["ensure_scores_are_not_same"] = False
        overlay["include_messages"] = True
        if env_config.data_path_to_save_groups is None:
            overlay["data_path_to_save_groups"] = f"data/{env_cls.name or 'groups'}.jsonl"
    return overlay


def resolve(
    env_cls: type[BaseEnv], command: str, argv: Sequence[str], defaults: tuple[Any, Any] | None = None
) -> RunSettings:
    """Combine flags, YAML and ``config_init`` into the settings of a run."""
    env_config, server_defaults = env_cls.config_init() if defaults is None else defaults
    flags = read_flags(argv, flag_fields(env_cls, command, env_config))
    path = flags.pop("config", None)
    yaml_config = cli.load_yaml(path) if path else {}
    check_yaml(yaml_config, env_cls, env_config)
    overrides = cli.merge_dicts(
        command_overlay(env_cls, command, env_config),
        yaml_config.get(ENV_NAMESPACE),
        cli.extract_namespace(flags, ENV_NAMESPACE + NAMESPACE_SEP),
    )
    config = cli.with_overrides(env_config, overrides)
    if config.wandb_name is None:
        config.wandb_name = env_cls.name or env_cls.__name__
    manager = cli.merge_dicts({k: v for k, v in yaml_config.items() if k in ServerManagerConfig.model_fields}, flags)
    try:
        manager_config = ServerManagerConfig(
            **{k: v for k, v in manager.items() if k in ServerManagerConfig.model_fields}
        )
        servers = resolve_openai_configs(server_defaults, {}, _without_empty_servers(yaml_config), flags, logger)
    except ValidationError as error:
        raise ConfigError(cli.validation_message(error)) from error
    check_values(command, config, servers)
    return RunSettings(
        command=command,
        env_config=config,
        server_configs=servers,
        slurm=manager_config.slurm,
        testing=manager_config.testing,
        max_n_completions=manager_config.max_n_completions if "max_n_completions" in manager else None,
        proxy_url=manager_config.proxy_url,
        yaml_config=yaml_config,
        flags=flags,
    )


def check_values(command: str, config: BaseEnvConfig, servers: Any) -> None:
    """Refuse settings with which no group can be made or sent."""
    needed = {"serve": ("group_size", "max_token_length"), "process": ("group_size",)}  # evaluate may do without
    for name in needed.get(command, ()):
        if isinstance(value := getattr(config, name), int) and value < 1:
            raise ConfigError(f"env.{name} is {value}; it must be 1 or more")
    if command == "process" and config.total_steps < 1:
        raise ConfigError(f"env.total_steps is {config.total_steps}; process makes that many groups, give 1 or more")
    if command == "serve":
        cli.check_url(config.rollout_server_url, "env.rollout_server_url")
    for server in servers if isinstance(servers, list) else [servers]:
        if url := getattr(server, "base_url", None):
            cli.check_url(url, "openai.base_url")


def _without_empty_servers(yaml_config: dict[str, Any]) -> dict[str, Any]:
    """The YAML content with an empty ``openai:`` section left out."""
    return {key: value for key, value in yaml_config.items() if not (key == OPENAI_NAMESPACE and not value)}


# ---------------------------------------------------------------------- running


def constructor_keywords(env_cls: type[BaseEnv], settings: RunSettings) -> dict[str, Any]:
    """What to construct ``env_cls`` with: its config and servers, and ``slurm`` and ``testing`` if it takes them."""
    parameters = inspect.signature(env_cls.__init__).parameters.values()
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name for parameter in parameters}
    optional = {"slurm": settings.slurm, "testing": settings.testing}
    return {
        "config": settings.env_config,
        "server_configs": settings.server_configs,
        **{name: value for name, value in optional.items() if takes_any or name in named},
    }


def build_env(env_cls: type[BaseEnv], settings: RunSettings) -> BaseEnv:
    """Construct the environment and apply what its constructor has no argument for."""
    env = env_cls.from_cli(settings)
    if settings.max_n_completions is not None:
        env.server.max_n_completions = settings.max_n_completions
    if settings.proxy_url is not None:
        env.server.proxy_url = settings.proxy_url
    if settings.command == "process":
        env.process_mode = True
        env.n_groups_to_process = settings.env_config.total_steps
        env.group_size_to_process = settings.env_config.group_size
    return env


def run_command(env_cls: type[BaseEnv], settings: RunSettings) -> None:
    """Show the settings, build the environment, run it."""
    show_settings(settings)
    if settings.command != "serve":
        warn_about_local_servers(settings)
    if settings.command == "evaluate":
        write_evaluate_config(settings)
    env = build_env(env_cls, settings)
    work = {"serve": env.env_manager, "process": env.process_manager, "evaluate": env._run_evaluate}[settings.command]
    asyncio.run(_run_until_told(work()))


async def _run_until_told(work: Any) -> None:
    """Run ``work``; a SIGTERM ends it in order, as ctrl-c does."""
    task = asyncio.ensure_future(work)
    with suppress(NotImplementedError, ValueError, RuntimeError):  # no signal handlers off the main thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
        logger.info("stopped on request")


def show_settings(settings: RunSettings) -> None:
    """Print the settings of the run, secrets masked."""
    from rich.console import Console
    from rich.pretty import Pretty

    console = Console(stderr=True)
    console.print("environment", Pretty(cli.mask_secrets(settings.env_config)))
    console.print("servers", Pretty(cli.mask_secrets(settings.server_configs)))


def warn_about_local_servers(settings: RunSettings) -> None:
    """Say once that a model must be running on this machine."""
    servers = settings.server_configs if isinstance(settings.server_configs, list) else [settings.server_configs]
    local = [
        url
        for url in (getattr(server, "base_url", None) for server in servers)
        if url and any(host in url for host in LOCAL_HOSTS)
    ]
    if local and not settings.testing:
        logger.warning("base_url is %s: an inference server must be running there", local[0])


def write_evaluate_config(settings: RunSettings) -> None:
    """Keep what an evaluation was run with as ``evaluate_config.yaml``, secrets masked."""
    if settings.env_config.data_dir_to_save_evals is None:
        return
    import yaml

    folder = cli.make_folder(settings.env_config.data_dir_to_save_evals, "env.data_dir_to_save_evals")
    content = {
        ENV_NAMESPACE: cli.mask_secrets(settings.env_config),
        OPENAI_NAMESPACE: cli.mask_secrets(settings.server_configs),
        "slurm": settings.slurm,
        "testing": settings.testing,
    }
    (folder / "evaluate_config.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


@ends_with_its_reader
def main(env_cls: type[BaseEnv], argv: Sequence[str]) -> int:
    """Run one command of an environment; returns the exit code (0, 1 for a failed run, 2 for wrong usage)."""
    from atroposlib.envs.env_help import command_help, overview

    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(overview(env_cls) + "\n")
        return 0 if argv else 2
    command, *rest = argv
    try:
        if command not in COMMANDS:
            raise ConfigError(unknown_name_message("command", command, COMMANDS))
        if any(word in ("-h", "--help") for word in rest):
            sys.stdout.write(command_help(env_cls, command) + "\n")
            return 0
        configure_logging()
        run_command(env_cls, resolve(env_cls, command, rest))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return getattr(error, "exit_code", 2)
    except AtroposError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def configure_logging() -> None:
    """Show messages of level INFO unless the program set up logging itself."""
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)


def command_model(
    env_cls: type[BaseEnv], command: str, env_config: BaseEnvConfig, server_configs: Any
) -> type[BaseModel]:
    """A model with one field per flag (defaults as ``config_init`` has them) and a ``run()``."""
    env_model = cli.adjust_model_defaults(
        type(env_config), cli.with_overrides(env_config, command_overlay(env_cls, command, env_config))
    )
    prefixed = (
        cli.get_prefixed_pydantic_model(env_model, ENV_NAMESPACE + NAMESPACE_SEP),
        cli.get_prefixed_pydantic_model(APIServerConfig, OPENAI_NAMESPACE + NAMESPACE_SEP),
    )

    def run(self: BaseModel) -> None:
        argv = sys.argv[1:]
        run_command(
            env_cls,
            resolve(env_cls, command, argv[1:] if argv[:1] == [command] else argv, (env_config, server_configs)),
        )

    model = create_model(
        f"Cli{command.capitalize()}Config", __base__=(*prefixed, ServerManagerConfig), config=(str | None, None)
    )
    model.run = run  # type: ignore[attr-defined]
    return model
