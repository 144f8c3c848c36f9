"""Which models the engine takes. What it cannot run is refused at start, by name and with the reason."""

from __future__ import annotations

import logging
from typing import Any

import torch

from atlaslib.engine.config import SamplingParams
from atlaslib.errors import ConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)
KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_MAX_MODEL_LEN = 32768  # when nothing is asked for
_LEAN_TOLERANCE = 1e-4  # in log-prob, between the lean decode path and the modules


def check_supported(model: Any) -> None:
    """Raise UnsupportedModelError for what can be told from the config."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model; the engine needs a causal language model"
        )
    reason = _reason(model, config)
    if reason:
        kind = getattr(config, "model_type", "?")
        raise UnsupportedModelError(
            f"the engine cannot sample from {type(model).__name__} (model_type {kind!r}): {reason}"
        )


def _reason(model: Any, config: Any) -> str | None:
    text = text_config(config)
    layer_types = set(getattr(text, "layer_types", None) or [])
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; only decoder-only models are supported"
    if model.get_output_embeddings() is None:
        return "it has no output embeddings, so it is not a language model head"
    if (
        hasattr(text, "state_size")
        or hasattr(text, "mamba_d_state")
        or getattr(text, "model_type", "") in ("rwkv", "mamba")
    ):
        return "it is a state-space model, its memory is not keys and values"
    if layer_types - KNOWN_LAYER_TYPES:
        return f"its layer types {sorted(layer_types - KNOWN_LAYER_TYPES)} keep state that is not keys and values"
    if getattr(text, "use_bidirectional_attention", False) or not getattr(text, "is_causal", True):
        return "its attention is bidirectional"
    if not getattr(base, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention interface"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return f"its parameters lie on several devices ({', '.join(sorted(map(str, devices)))})"
    if devices == {torch.device("meta")}:
        return "its weights are not loaded (meta device)"
    return None


def text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def choose_length(model: Any, asked: int | None) -> int:
    """Longest prompt + reply: what was asked for, or what the model's positions allow, within reason."""
    limit = getattr(text_config(model.config), "max_position_embeddings", None)
    if asked is not None and limit is not None and asked > limit:
        raise ConfigError(f"max_model_len={asked} is more than the {limit} positions of {type(model).__name__}")
    return asked or min(int(limit or _MAX_MODEL_LEN), _MAX_MODEL_LEN)


def eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a reply: of the generation config, the model config and the tokenizer."""
    sources = [getattr(model, "generation_config", None), text_config(model.config), tokenizer]
    found: list[int] = []
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        for token in value if isinstance(value, list | tuple) else [value]:
            if token is not None and token not in found:
                found.append(int(token))
    return found


def probe(engine: Any) -> None:
    """Compare a short paged run with the model's plain forward; raise when they are not the same function."""
    model, vocab = engine.model, engine.runner.vocab_size
    tokens = [(7919 * i + 11) % vocab for i in range(max(1, min(12, engine.max_model_len - 4)))]
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    try:
        reply = engine.generate([tokens], params)[0][0]
        if engine.runner.lean is not None:
            reply = _check_lean(engine, tokens, params, reply)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"the engine cannot sample from {type(model).__name__}: its attention uses {error}"
        ) from error
    whole = tokens + reply.token_ids
    ids = torch.tensor([whole], device=engine.runner.device)
    with engine.runner.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    plain = torch.log_softmax(logits, dim=-1)[torch.arange(len(whole) - 1), whole[1:]].tolist()
    paged = [*(reply.prompt_logprobs or [])[1:], *reply.raw_logprobs]
    difference = max(abs(a - b) for a, b in zip(plain, paged, strict=True))
    allowed = 2e-3 if next(model.parameters()).dtype == torch.float32 else 0.5
    if not difference <= allowed:  # also catches nan
        raise UnsupportedModelError(
            f"the engine cannot sample from {type(model).__name__} (model_type {model.config.model_type!r}): its paged forward "
            f"differs from its plain forward by {difference:.3g} in log-prob; its attention must do something the "
            f"engine does not know, or its own implementation ({model.config._attn_implementation!r}) leaves something out that "
            "attn_implementation='eager' has"
        )
    logger.debug("paged and plain forward of %s agree to %.2g", type(model).__name__, difference)


def _check_lean(engine: Any, tokens: list[int], params: SamplingParams, reply: Any) -> Any:
    """Keep the lean decode path only when the modules give the same; the reply of the path that is kept."""
    lean, engine.runner.lean = engine.runner.lean, None
    expected = engine.generate([tokens], params)[0][0]
    pairs = zip(expected.raw_logprobs, reply.raw_logprobs, strict=True)
    difference = max(abs(a - b) for a, b in pairs)
    if expected.token_ids == reply.token_ids and difference <= _LEAN_TOLERANCE:
        engine.runner.lean = lean
        return reply
    name = type(engine.model).__name__
    logger.debug("decode steps of %s run its modules: the lean path differs by %.2g", name, difference)
    return expected
