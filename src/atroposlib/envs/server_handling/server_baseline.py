"""The documented import path of server configuration and the server base class."""

from __future__ import annotations

from atroposlib.envs.server_handling.adaptive_semaphore import AsyncSemWithAdaptiveWeight
from atroposlib.envs.server_handling.api_server import APIServer
from atroposlib.envs.server_handling.server_config import (
    VALID_REASONING_EFFORTS,
    APIServerConfig,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
)

__all__ = [
    "VALID_REASONING_EFFORTS",
    "APIServer",
    "APIServerConfig",
    "AsyncSemWithAdaptiveWeight",
    "OpenaiConfig",
    "ReasoningConfig",
    "ServerBaseline",
]
