"""The exceptions of atlaslib; the tree hangs below :class:`atroposlib.errors.AtroposError`."""

from __future__ import annotations

from atroposlib.errors import AtroposError, ConfigError, MissingExtraError, nearest_name, unknown_name_message

__all__ = ["AtroposError", "ConfigError", "MissingExtraError", "nearest_name", "unknown_name_message"]


class EngineInputError(AtroposError, ValueError):
    """A request to the engine cannot be served as it stands: which value, and what would be allowed."""


class UnsupportedModelError(ConfigError):
    """The engine cannot sample from this model; the message names the model and the reason."""


class EngineMemoryError(ConfigError):
    """The key-value cache does not fit; the message says how much would."""


class EngineStoppedError(AtroposError):
    """The engine thread ended before the request did."""
