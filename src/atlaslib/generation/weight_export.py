"""The trainer's weights as a folder another engine can load."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from atlaslib.generation.replica import whole


def export_weights(model: Any, folder: Path, *, untie: bool = True, tokenizer: Any = None, writes: bool = True) -> Path:
    """Write ``model.safetensors`` and ``config.json``; an adapter is merged, a tied head is written out as its own tensor.

    Servers that reload weights at run time may keep the old head of a model with tied embeddings; an untied export avoids that.
    Putting a sharded model together takes all processes: each calls this, one ``writes``.
    """
    from safetensors.torch import save_file

    tied = bool(base_model(model).config.tie_word_embeddings)
    weights = full_state(model)
    if tied and untie:
        head = base_model(model).get_output_embeddings()
        weights = itertools.chain(weights, [("lm_head.weight", _whole(head.weight))])
    state: dict[str, torch.Tensor] = {}
    for name, value in weights:
        if writes and not (tied and not untie and name == "lm_head.weight"):
            state[name] = value.detach().to("cpu").contiguous().clone()
    if not writes:
        return folder
    config = base_model(model).config.to_dict()
    config["tie_word_embeddings"] = tied and not untie
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(state, partial / "model.safetensors", {"format": "pt"})
    (partial / "config.json").write_text(json.dumps(config, default=str))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(partial))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    return folder


def base_model(model: Any) -> Any:
    """The transformers model inside an adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def full_state(model: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Names and whole tensors as a plain model of that kind would have them; LoRA weights are added in."""
    if not hasattr(model, "get_base_model"):
        seen: set[int] = set()
        for name, value in model.named_parameters():
            if id(value) not in seen:
                seen.add(id(value))
                yield name, _whole(value)
        return
    for name, module in base_model(model).named_modules():
        layer = getattr(module, "base_layer", None)
        if layer is None:
            continue
        weight = _whole(layer.weight)
        for adapter in getattr(module, "active_adapters", []):
            if hasattr(module, "get_delta_weight") and adapter in getattr(module, "lora_A", {}):
                weight = weight + _delta_weight(module, adapter).to(weight.dtype)
        yield f"{name}.weight", weight
        if getattr(layer, "bias", None) is not None:
            yield f"{name}.bias", _whole(layer.bias)
    for name, value in base_model(model).named_parameters():
        if (
            ".base_layer." not in name
            and "lora_" not in name
            and "modules_to_save" not in name
            and "original_module" not in name
        ):
            yield name, _whole(value)
        elif ".modules_to_save." in name:
            head, _, tail = name.partition(".modules_to_save.")
            yield f"{head}.{tail.split('.', 1)[1]}", _whole(value)


def _delta_weight(module: Any, adapter: str) -> torch.Tensor:
    """What the adapter adds to its layer's weight, from whole matrices."""
    with contextlib.ExitStack() as stack:
        for part in (module.lora_A[adapter], module.lora_B[adapter]):
            stack.enter_context(whole(part.weight))
        return _whole(module.get_delta_weight(adapter))


def _whole(value: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together; others as they are."""
    with whole(value) as tensor:
        return tensor.detach().clone() if hasattr(value, "ds_id") else tensor.detach()
