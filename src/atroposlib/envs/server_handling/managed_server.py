"""Token-exact sessions (being filled in)."""

from __future__ import annotations

from typing import Any


class ManagedServer:
    def __init__(self, server: Any, tokenizer: Any = None, track_tree: bool = False, tool_parser: str | None = None, preserve_think_blocks: bool = False) -> None:
        self.server = server

    def reset(self) -> None: ...


class DummyManagedServer(ManagedServer): ...
