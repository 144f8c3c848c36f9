"""From server settings to server objects: listed ones as given, others found on Slurm nodes or local ports."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from atroposlib.envs.server_handling.api_server import APIServer
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_config import APIServerConfig, ReasoningConfig, ServerBaseline
from atroposlib.envs.server_handling.server_harness import DeterministicServer
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.slurm import slurm_server_urls
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import ConfigError

logger = logging.getLogger(__name__)

LOCAL_URLS = tuple(f"http://localhost:{port}/v1" for port in range(9004, 9008))
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "0.0.0.0", "::1"})
SERVER_CLASSES: dict[str, type[APIServer]] = {
    "openai": OpenAIServer,
    "vllm": VLLMServer,
    "sglang": SGLangServer,
    "trl": TrlVllmServer,
}
_said_outside_slurm = False


def build_servers(
    configs: ServerBaseline | APIServerConfig | Sequence[APIServerConfig],
    *,
    server_class: type[APIServer] | None,
    slurm: bool,
    testing: bool,
    reasoning_config: ReasoningConfig | None,
) -> list[Any]:
    """One server object per configured or discovered server; in testing mode one that answers in process."""
    if testing:
        return [DeterministicServer(_first_config(configs))]
    listed = server_configs(configs, slurm=slurm)
    return [
        (server_class or SERVER_CLASSES[config.server_type])(config, reasoning_config=reasoning_config)
        for config in listed
    ]


def server_configs(
    configs: ServerBaseline | APIServerConfig | Sequence[APIServerConfig], *, slurm: bool
) -> list[APIServerConfig]:
    """The configuration of every server to talk to. A bare ``APIServerConfig`` is a list of one."""
    urls = _slurm_urls() if slurm else []
    if isinstance(configs, APIServerConfig):
        configs = [configs]
    if isinstance(configs, ServerBaseline):
        shared = {"api_key": "x", **configs.model_dump()}
        return [APIServerConfig(**{**shared, "base_url": url}) for url in urls or LOCAL_URLS]
    listed = list(configs)
    if not listed:
        raise ConfigError("no inference server is configured; give a list with at least one APIServerConfig")
    if not urls:
        return listed
    if any(_is_remote(config.base_url) for config in listed):
        logger.info("inside Slurm, but the servers name remote hosts; they are used as given")
        return listed
    logger.info("inside Slurm: using the %d inference servers of the node list", len(urls))
    return [listed[0].model_copy(deep=True, update={"base_url": url}) for url in urls]


def _slurm_urls() -> list[str]:
    global _said_outside_slurm
    if "SLURM_JOB_NODELIST" not in os.environ:
        if not _said_outside_slurm:
            logger.debug("slurm is on, but this is not a Slurm job; servers are used as configured")
            _said_outside_slurm = True
        return []
    return slurm_server_urls()


def _is_remote(url: str | None) -> bool:
    return bool(url) and urlsplit(url or "").hostname not in LOOPBACK_HOSTS


def _first_config(configs: Any) -> APIServerConfig:
    first = configs[0] if isinstance(configs, list | tuple) and configs else configs
    if isinstance(first, APIServerConfig):
        return first
    return APIServerConfig(**first.model_dump()) if isinstance(first, ServerBaseline) else APIServerConfig()
