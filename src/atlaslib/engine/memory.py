"""How many cache blocks fit, and what to say when too few do."""

from __future__ import annotations

import os
from typing import Any

import torch

from atlaslib.engine.attention import LayerShape
from atlaslib.engine.config import EngineConfig
from atlaslib.engine.support import text_config
from atlaslib.errors import EngineMemoryError

_CAPTURED_FLOP = 2.5e13  # of a prefill that keeps the device busy about as long as the host needs to launch it


def bytes_per_token(layers: list[LayerShape]) -> int:
    return sum((s.key_dim + s.value_dim) * s.kv_heads * s.dtype.itemsize for s in layers)


def activation_bytes(model: Any, config: EngineConfig, max_model_len: int) -> int:
    """What prefill steps need beside weights and cache: a layer's widest tensors, and the logits of a full batch."""
    text = text_config(model.config)
    tokens = prefill_tokens(config, torch.device("cuda")) + captured_tokens(model, config, max_model_len)
    width = 4 * int(getattr(text, "intermediate_size", 0) or 0) + 8 * int(text.hidden_size)
    return 2 * tokens * width + 6 * config.max_num_seqs * int(text.vocab_size) + (1 << 29)


def captured_tokens(model: Any, config: EngineConfig, max_model_len: int) -> int:
    """Prompt tokens up to which CUDA prefill steps are captured as graphs."""
    if config.exact or not config.cuda_graphs:
        return 0
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ever = min(prefill_tokens(config, torch.device("cuda")), config.max_num_seqs * max_model_len)
    return min(ever, 16384, int(_CAPTURED_FLOP / (2 * parameters)))


def prefill_tokens(config: EngineConfig, device: torch.device) -> int:
    return config.max_prefill_tokens or (16384 if device.type == "cuda" else 2048)


def choose_num_blocks(
    layers: list[LayerShape], config: EngineConfig, max_model_len: int, device: torch.device, reserve: int
) -> int:
    """Blocks the cache gets: as many as can ever be used, as configured, or as memory allows."""
    block_bytes = bytes_per_token(layers) * config.block_size
    useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    allowed, source = _allowed_bytes(config, device, reserve)
    fitting = allowed // block_bytes
    if config.num_blocks is None:
        num_blocks = min(useful, fitting)
        if num_blocks < 1:
            raise EngineMemoryError(
                f"not even one cache block of {_human(block_bytes)} fits into {_human(allowed)} ({source}); "
                "free memory or lower block_size"
            )
        return num_blocks
    if device.type != "cuda":  # who names a number means it, as far as the machine goes
        allowed, source = _physical_memory(), "the memory of this machine"
        fitting = allowed // block_bytes
    if config.num_blocks > fitting:
        raise EngineMemoryError(
            f"num_blocks={config.num_blocks} needs {_human(config.num_blocks * block_bytes)}, but {_human(allowed)} "
            f"is available ({source}): at most num_blocks={fitting} fits ({fitting * config.block_size} tokens)"
        )
    return config.num_blocks


def _allowed_bytes(config: EngineConfig, device: torch.device, reserve: int) -> tuple[int, str]:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return max(0, int(free * config.memory_fraction) - reserve), (
            f"memory_fraction={config.memory_fraction:g} of {_human(free)} free, less {_human(reserve)} for activations"
        )
    return config.cpu_cache_bytes, f"cpu_cache_bytes={config.cpu_cache_bytes}"


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _human(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
