"""Loading what a trainer trains: policy, tokenizer, adapter, reference."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch

from atlaslib.errors import ConfigError, MissingExtraError
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.policy import find_decoder

logger = logging.getLogger(__name__)


def load_policy(model: Any, config: GRPOConfig) -> Any:
    """The policy: the object given, or loaded by name (``model`` or ``model_name_or_path``)."""
    if model is not None and not isinstance(model, str):
        if config.model_init_kwargs:
            raise ConfigError("model_init_kwargs are for a model given by name; the trainer was handed a model object")
        return model
    return load_causal_lm(model or config.require_model_name(), config)


def load_causal_lm(name: str, config: GRPOConfig, init_kwargs: dict[str, Any] | None = None) -> Any:
    """``AutoModelForCausalLM`` with ``init_kwargs`` (default: the config's); float32 unless they say otherwise."""
    from transformers import AutoModelForCausalLM

    kwargs = dict(init_kwargs if init_kwargs is not None else config.model_init_kwargs or {})
    dtype = kwargs.pop("torch_dtype", kwargs.pop("dtype", None))
    if isinstance(dtype, str) and dtype != "auto":
        resolved = getattr(torch, dtype, None)
        if not isinstance(resolved, torch.dtype):
            raise ConfigError(
                f"model_init_kwargs: {dtype!r} is not a torch dtype; use for instance 'float32' or 'bfloat16'"
            )
        dtype = resolved
    try:
        with whole_weights(config):
            return AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype if dtype is not None else torch.float32, **kwargs
            )
    except OSError as error:
        raise ConfigError(f"model {name!r} cannot be loaded: {error}") from error


@contextlib.contextmanager
def whole_weights(config: GRPOConfig) -> Iterator[None]:
    """Under DeepSpeed ZeRO-3 transformers cuts weights up while it reads them; here they are read whole.

    Sampler, reference and students want whole weights; the policy is cut up when training begins.
    """
    active = getattr(config, "hf_deepspeed_config", None)
    if active is None:
        yield
        return
    from transformers.integrations import deepspeed

    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed.set_hf_deepspeed_config(active)


def load_tokenizer(processing_class: Any, model: Any, config: GRPOConfig) -> Any:
    """The tokenizer given, or the model's own."""
    if processing_class is None:
        from transformers import AutoTokenizer

        name = config.model_name_or_path or getattr(model.config, "_name_or_path", "")
        if not name:
            raise ConfigError(
                "no tokenizer: the model object does not say where it comes from; pass processing_class=tokenizer"
            )
        try:
            processing_class = AutoTokenizer.from_pretrained(name)
        except OSError as error:
            raise ConfigError(f"tokenizer {name!r} cannot be loaded: {error}") from error
    if processing_class.pad_token_id is None:
        if processing_class.eos_token is None:
            raise ConfigError("the tokenizer has neither a pad nor an EOS token; set tokenizer.pad_token")
        processing_class.pad_token = processing_class.eos_token
    return processing_class


def with_adapter(model: Any, peft_config: Any, config: GRPOConfig) -> Any:
    """The model inside a LoRA (or other peft) adapter; without ``peft_config`` the model as it is."""
    if peft_config is None:
        return model
    try:
        from peft import PeftModel, get_peft_model, prepare_model_for_kbit_training
    except ImportError as error:
        raise MissingExtraError("peft_config", package="peft", extra="train") from error
    if isinstance(model, PeftModel):
        raise ConfigError("the model already has an adapter; leave peft_config out")
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=config.gradient_checkpointing)
    adapted = get_peft_model(model, peft_config)
    if config.gradient_checkpointing and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    return adapted


def has_adapter(model: Any) -> bool:
    """Whether the model is a peft model, whose base is its own reference."""
    return hasattr(model, "disable_adapter") and hasattr(model, "get_base_model")


def make_reference(model: Any, config: GRPOConfig) -> Any:
    """A frozen copy of the policy; None when beta is 0 or an adapter can be switched off instead."""
    if has_adapter(model) and config.sync_ref_model:
        raise ConfigError(
            "sync_ref_model=True with an adapter: the reference is the model without it, which never moves; leave one out"
        )
    if config.beta == 0.0 or has_adapter(model):
        return None
    if next(model.parameters()).device.type == "meta":
        return freeze(load_causal_lm(config.require_model_name(), config))
    return freeze(copy.deepcopy(model))


def freeze(model: Any) -> Any:
    """No gradients, evaluation mode."""
    model.requires_grad_(False)
    return model.eval()


def train_last_layers(model: Any, count: int | None) -> None:
    """Gradients only for the last ``count`` layers and what follows them in the decoder (the final norm); None = leave all as it is.

    The layers below see no input that needs a gradient, so no graph is built for them.
    """
    if count is None:
        return
    if has_adapter(model):
        raise ConfigError(
            "trainable_layers is for training without an adapter; use LoraConfig(layers_to_transform=...)"
        )
    decoder = find_decoder(model)
    children = list(decoder.children())
    depth = model.config.get_text_config().num_hidden_layers
    place = next((i for i, c in enumerate(children) if isinstance(c, torch.nn.ModuleList) and len(c) == depth), None)
    if place is None:
        raise ConfigError(f"trainable_layers: cannot find the {depth} layers of {type(decoder).__name__}; leave it out")
    if count > depth:
        raise ConfigError(f"trainable_layers is {count}; {type(model).__name__} has {depth} layers")
    model.requires_grad_(False)
    for part in [*list(children[place])[-count:], *children[place + 1 :]]:
        part.requires_grad_(True)


def stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a completion, of the tokenizer and of the model's generation settings."""
    ids: list[int] = []
    generation = getattr(model, "generation_config", None)
    for value in (tokenizer.eos_token_id, getattr(generation, "eos_token_id", None)):
        ids += [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(int(i) for i in ids))
