"""What environments written against other versions of the interface ask of ``BaseEnv``, beside what it documents.

``self.client.chat.completions.create(...)``, ``self.server_configs`` and a class method ``config_cls``. A name that an environment
sets itself is its own.
"""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace
from typing import Any

from atroposlib.envs.env_config import BaseEnvConfig


class OlderInterfaces:
    """Base of ``BaseEnv``; needs its ``server`` and ``env_config_cls``."""

    server: Any
    env_config_cls: Any

    @cached_property
    def client(self) -> SimpleNamespace:
        """The two ``create`` calls of an OpenAI client, answered by the environment's servers with their own model."""

        async def chat(*, model: str | None = None, **kwargs: Any) -> Any:
            return await self.server.chat_completion(**kwargs)

        async def text(*, model: str | None = None, **kwargs: Any) -> Any:
            return await self.server.completion(**kwargs)

        return SimpleNamespace(
            chat=SimpleNamespace(completions=SimpleNamespace(create=chat)), completions=SimpleNamespace(create=text)
        )

    @cached_property
    def server_configs(self) -> list[Any]:
        """The configuration of each server."""
        return [server.config for server in self.server.servers]

    @classmethod
    def default_config(cls) -> Any:
        """The config class with its defaults: ``env_config_cls``, or where that is not set what ``config_cls()`` names."""
        named = getattr(cls, "config_cls", None)
        if cls.env_config_cls is not BaseEnvConfig or named is None:
            return cls.env_config_cls()
        return named()() if not isinstance(named, type) else named()
