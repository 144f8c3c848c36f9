"""The exceptions of atroposlib.

    AtroposError
    ├── ConfigError          (ValueError)   a setting is wrong: what, which value, what to do
    ├── MissingExtraError    (ImportError)  an optional dependency is needed and absent
    └── InferenceServerError                a request to an inference server failed; also time-outs and servers that are down

Every message says what failed, the value, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AtroposError(Exception):
    """Base of everything this project raises on purpose."""


class ConfigError(AtroposError, ValueError):
    """A configuration value, key or file is wrong."""


class MissingExtraError(AtroposError, ImportError):
    """A feature needs a package that is not installed.

    Example: ``raise MissingExtraError("logging to wandb", package="wandb", extra="wandb")``
    """

    def __init__(self, feature: str, *, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package {package!r}; install it with: pip install 'atropos-atlas[{extra}]'"
        )
        self.feature, self.package, self.extra = feature, package, extra

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_missing_extra, (self.feature, self.package, self.extra))


PACKAGE_ADVICE = (
    "install that package; 'atropos-atlas[envs]' and 'atropos-atlas[examples]' bring those of known environments"
)
"""For an environment that imports what is not installed."""


def _rebuild_missing_extra(feature: str, package: str, extra: str) -> MissingExtraError:
    return MissingExtraError(feature, package=package, extra=extra)


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def unknown_name_message(kind: str, name: str, known: Iterable[str]) -> str:
    """One sentence for an unknown key or flag, with the nearest known name when there is one."""
    names = sorted(known)
    guess = nearest_name(name, names)
    hint = (
        f"did you mean {guess!r}?" if guess else f"known: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
    )
    return f"unknown {kind} {name!r}; {hint}"


class InferenceServerError(AtroposError):
    """A request to an inference server failed; says which server, the HTTP status and the head of the reply."""

    retry_after_s: float | None = None  # how long the server asks to be left alone

    def __init__(
        self, message: str, *, url: str, status: int | None = None, body: str = "", retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.message, self.url, self.status, self.body, self.retryable = message, url, status, body, retryable

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_inference_error, (type(self), self.message, self.url, self.status, self.body, self.retryable))


class InferenceTimeoutError(InferenceServerError, TimeoutError):
    """An inference server did not answer in time."""


class InferenceUnavailableError(InferenceServerError, ConnectionError):
    """An inference server cannot be reached, or stayed down longer than the configured wait."""


def _rebuild_inference_error(
    kind: type[InferenceServerError], message: str, url: str, status: int | None, body: str, retryable: bool
) -> InferenceServerError:
    return kind(message, url=url, status=status, body=body, retryable=retryable)


class FailedExecutionException(ConfigError):  # noqa: N818 (the name existing command-line code catches)
    """A command cannot run as asked; ``exit_code`` is what the process ends with."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.message, self.exit_code = message, exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return (FailedExecutionException, (self.message, self.exit_code))


class RolloutRejectedError(AtroposError):
    """The rollout server refused a request (HTTP 4xx): sending it again would not help. ``status`` and ``detail`` say why."""

    def __init__(self, message: str, *, status: int, detail: str = "") -> None:
        super().__init__(message)
        self.message, self.status, self.detail = message, status, detail

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_rollout_rejected, (self.message, self.status, self.detail))


def _rebuild_rollout_rejected(message: str, status: int, detail: str) -> RolloutRejectedError:
    return RolloutRejectedError(message, status=status, detail=detail)


class RolloutServerUnavailableError(AtroposError, ConnectionError):
    """The rollout server could not be reached for longer than the caller wanted to wait."""


class JournalError(AtroposError, OSError):
    """The rollout server's journal cannot be read or written (disk full, damaged, used by another server)."""


class RewardComputationError(AtroposError):
    """A reward function failed for every completion it was given; the first cause is chained."""


class UnknownRewardError(ConfigError, ImportError):
    """No reward function has this name."""


class WorkerError(AtroposError, RuntimeError):
    """A foreign environment's process failed a request, could not start, or ended."""
