"""The exceptions of atlaslib; the tree hangs below :class:`atroposlib.errors.AtroposError`."""

from __future__ import annotations

from atroposlib.errors import AtroposError, ConfigError, MissingExtraError, nearest_name, unknown_name_message

__all__ = ["AtroposError", "ConfigError", "MissingExtraError", "nearest_name", "unknown_name_message"]
