"""Data sets of the hub; the package ``datasets`` is needed only here."""

from __future__ import annotations

from typing import Any

from atlaslib.errors import ConfigError, MissingExtraError


def load_hub_rows(source: str) -> Any:
    """``NAME`` or ``NAME:SPLIT`` (default split train)."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtraError(f"the data set {source!r}", package="datasets", extra="train") from error
    name, _, split = source.partition(":")
    try:
        return load_dataset(name, split=split or "train")
    except (OSError, ValueError) as error:
        raise ConfigError(f"data set {source!r} cannot be loaded: {error}") from error
