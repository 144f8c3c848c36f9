"""The exceptions of atroposlib.

    AtroposError
    ├── ConfigError          (ValueError)   a setting is wrong: what, which value, what to do
    └── MissingExtraError    (ImportError)  an optional dependency is needed and absent

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
        super().__init__(f"{feature} needs the package {package!r}; install it with: pip install 'atropos-atlas[{extra}]'")
        self.feature, self.package, self.extra = feature, package, extra

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_missing_extra, (self.feature, self.package, self.extra))


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
    hint = f"did you mean {guess!r}?" if guess else f"known: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
    return f"unknown {kind} {name!r}; {hint}"
