"""``OpenAIServer``: any endpoint that speaks the OpenAI API, and how server settings of three sources are combined."""

from __future__ import annotations

import logging
from typing import Any

from atroposlib.envs.server_handling.adaptive_semaphore import AsyncSemWithAdaptiveWeight
from atroposlib.envs.server_handling.api_server import TokensAndLogprobs
from atroposlib.envs.server_handling.openai_routes import OpenAIRoutes
from atroposlib.envs.server_handling.server_config import APIServerConfig, OpenaiConfig, ServerBaseline
from atroposlib.errors import ConfigError, FailedExecutionException

__all__ = [
    "APIServerConfig",
    "AsyncSemWithAdaptiveWeight",
    "OpenAIServer",
    "OpenaiConfig",
    "ServerBaseline",
    "resolve_openai_configs",
]

FLAG_PREFIX = "openai."


class OpenAIServer(OpenAIRoutes):
    """A server of which only the OpenAI API is known: text in, text out.

    Example: ``OpenAIServer(APIServerConfig(model_name="gpt-5-mini")).chat_completion(messages=[...])``
    """

    _client: Any = None

    @property
    def openai(self) -> Any:
        """An ``openai.AsyncOpenAI`` client for this server, for code that wants the package's own calls."""
        if self._client is None:
            import openai

            bearer = self.request_headers().get("Authorization", "Bearer x").removeprefix("Bearer ")
            self._client = openai.AsyncOpenAI(
                api_key=bearer, base_url=self.effective_base_url(), timeout=self.config.timeout
            )
        return self._client

    async def aclose(self) -> None:
        """Stop watching the server and close its connections."""
        await super().aclose()
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        raise NotImplementedError(
            "the OpenAI API has no call that takes and returns exact token ids; "
            "set server_type to 'vllm' or 'sglang' in the server config if the server is one of those"
        )


def resolve_openai_configs(
    default_server_configs: Any,
    openai_config_dict: dict[str, Any] | None,
    yaml_config: dict[str, Any] | None,
    cli_passed_flags: dict[str, Any] | None,
    logger: logging.Logger | None = None,
) -> Any:
    """The servers to use, from ``config_init``, the YAML file and the ``--openai.*`` flags.

    ``openai_config_dict`` is what the sources agreed on for one server (flags over YAML over ``config_init``). The
    result is a list of servers, one of them for a bare ``APIServerConfig``. A ``ServerBaseline`` is replaced by a list
    as soon as any source names a server, and otherwise stays one.
    """
    from_yaml = (yaml_config or {}).get("openai")
    from_flags = _server_flags(cli_passed_flags or {})
    merged = dict(openai_config_dict or {})
    if isinstance(from_yaml, list) and len(from_yaml) >= 2:
        _refuse_flags(from_flags, len(from_yaml), "the YAML file")
        return [_server_config(entry) for entry in from_yaml]
    given = {**_single(from_yaml), **from_flags}
    if isinstance(default_server_configs, list | tuple) and len(default_server_configs) >= 2:
        _refuse_flags(from_flags, len(default_server_configs), "config_init")
        if given.get("base_url"):
            return [_server_config(given)]
        if given and logger is not None:
            logger.warning(
                "one server without base_url under `openai:` cannot change the listed servers; it is ignored"
            )
        return default_server_configs
    if isinstance(default_server_configs, APIServerConfig):
        return [_server_config({**default_server_configs.model_dump(), **merged, **given})]
    if isinstance(default_server_configs, ServerBaseline):
        return _from_baseline(default_server_configs, given)
    default = default_server_configs[0].model_dump() if default_server_configs else {}
    return [_server_config({**default, **merged, **given})]


def _from_baseline(baseline: ServerBaseline, given: dict[str, Any]) -> Any:
    if not given:
        return baseline
    if given.get("base_url") or given.get("api_key"):
        return [_server_config({**baseline.model_dump(), **given})]
    return type(baseline)(**{**baseline.model_dump(), **given})


def _single(from_yaml: Any) -> dict[str, Any]:
    if isinstance(from_yaml, list):
        from_yaml = from_yaml[0] if from_yaml else {}
    return dict(from_yaml or {})


def _server_flags(flags: dict[str, Any]) -> dict[str, Any]:
    names = {name.lstrip("-"): value for name, value in flags.items()}
    return {name.removeprefix(FLAG_PREFIX): value for name, value in names.items() if name.startswith(FLAG_PREFIX)}


def _refuse_flags(from_flags: dict[str, Any], num_servers: int, source: str) -> None:
    if from_flags:
        raise FailedExecutionException(
            f"--openai.* flags cannot be combined with the {num_servers} servers of {source}: it is not clear which one "
            "they mean; put the values into the YAML list, or give one server",
            exit_code=2,
        )


def _server_config(values: Any) -> APIServerConfig:
    if isinstance(values, APIServerConfig):
        return values
    if not isinstance(values, dict):
        raise ConfigError(f"a server under `openai:` must be a mapping, got {values!r}")
    return APIServerConfig(**values)
