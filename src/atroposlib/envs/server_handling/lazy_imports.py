"""Names of heavy packages that exist at module level but are imported on first use."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Looks like the module ``name``; imports it at the first attribute access."""

    def __init__(self, name: str) -> None:
        self.__dict__["_module_name"] = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self.__dict__["_module_name"]), attribute)


class LazyAttribute:
    """Looks like ``module.attribute``; imports the module at the first access."""

    def __init__(self, module: str, attribute: str) -> None:
        self.__dict__["_place"] = (module, attribute)

    def _target(self) -> Any:
        module, attribute = self.__dict__["_place"]
        return getattr(importlib.import_module(module), attribute)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._target(), attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the real object."""
        return self._target()(*args, **kwargs)
