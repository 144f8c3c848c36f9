"""Fixtures for the torch side: a tiny real model on one thread."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def tiny_model() -> Any:
    from atlaslib.models.tiny import tiny_llama

    return tiny_llama()
