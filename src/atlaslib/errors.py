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


class ScoredGroupError(AtroposError, ValueError):
    """A group of rollouts cannot become training samples."""


class RolloutTimeoutError(AtroposError, TimeoutError):
    """No batch came in time; says who is waited for."""


class SamplerError(AtroposError, RuntimeError):
    """A sampler failed, or does not carry the weights it should; ``status`` is the HTTP status of a server that refused."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class StudentError(AtroposError, RuntimeError):
    """The student could not answer; the teaching round cannot be scored."""


class CheckpointError(AtroposError, RuntimeError):
    """A checkpoint is missing or incomplete."""
