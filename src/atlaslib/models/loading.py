"""Loading a causal language model with its tokenizer; the data type follows the device unless it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atlaslib.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


def resolve_model_path(name: str) -> str:
    """A model's folder or hub id; ``smollm2`` stands for the model in the wheel of that name."""
    if name == "smollm2":
        from atlaslib.models.smollm2 import smollm2_folder

        return str(smollm2_folder())
    return name


def choose_device(device: str) -> str:
    """``auto`` is the GPU where there is one."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        asked = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}; use auto, cpu, cuda or cuda:1") from error
    found = torch.cuda.device_count()
    if asked.type == "cuda" and (asked.index or 0) >= found:
        raise ConfigError(f"device is {device!r}, but torch {torch.__version__} sees {found} CUDA devices here")
    return device


def choose_dtype(dtype: str, device: str) -> Any:
    """``auto`` is bfloat16 on CUDA and float32 elsewhere: half precision on a CPU can be a hundred times slower."""
    import torch

    if dtype == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; use auto, {', '.join(DTYPES)}")
    return getattr(torch, dtype)


def load_model_and_tokenizer(name: str, *, device: str = "auto", dtype: str = "auto") -> tuple[Any, Any]:
    """The model on its device, in evaluation mode, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model_path(name)
    where = choose_device(device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=choose_dtype(dtype, where))
    except OSError as error:
        known = "" if Path(path).exists() else "; the folder does not exist, and the hub could not be asked"
        raise ConfigError(f"cannot load the model {name!r}{known}: {error}") from error
    return model.to(where).eval(), tokenizer
