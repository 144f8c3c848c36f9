"""What a :class:`GRPOConfig` must satisfy, with messages that say what, which value and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atlaslib.algorithms.losses import LOSS_TYPES
from atlaslib.errors import ConfigError, unknown_name_message

if TYPE_CHECKING:
    from atlaslib.trainers.grpo_config import GRPOConfig

CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": LOSS_TYPES,
    "kl_estimator": ("k1", "k2", "k3"),
    "importance_correction": ("none", "tis", "mis"),
    "importance_correction_level": ("token", "sequence"),
    "sampler": ("auto", "engine", "transformers", "vllm", "vllm_server"),
    "packing": ("auto", "padded", "packed", "shared_prefix"),
}
RAY_FIELDS: dict[str, object] = {
    "use_ray": False,
    "ray_share_training_devices": False,
    "ray_tensor_parallelism": 1,
    "ray_data_parallelism": None,
    "ray_no_memory_duplication": False,
}


def check_config(config: GRPOConfig) -> None:
    """Raise :class:`ConfigError` for the first thing that cannot work."""
    _check_choices(config)
    _check_unavailable(config)
    _check_numbers(config)
    _check_samplers(config)
    _check_compile(config)
    _check_exact(config)
    _check_batches(config)


def _check_choices(config: GRPOConfig) -> None:
    for name, allowed in CHOICES.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ConfigError(f"{name}: {unknown_name_message('value', str(value), allowed)}")
    if config.scale_rewards not in (None, "group", "batch", "none"):
        raise ConfigError(f"scale_rewards is {config.scale_rewards!r}; use 'group', 'batch', 'none' or leave it out")


def _check_unavailable(config: GRPOConfig) -> None:
    for name, neutral in RAY_FIELDS.items():
        if (getattr(config, name) or None) != (neutral or None):
            raise ConfigError(
                f"{name}={getattr(config, name)!r}: engines as Ray actors are not available; start vLLM servers with Ray (or anything) "
                "and set use_vllm_server, vllm_host, vllm_port and num_vllm_clients"
            )
    if config.vllm_group_port not in (None, 51216):
        raise ConfigError(
            f"vllm_group_port={config.vllm_group_port}: weights reach vLLM servers through a folder (vllm_weights_dir), not a NCCL group; leave it out"
        )
    if config.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size: the batch of a policy step is fixed by its groups; use backprop_accumulation_steps to save memory"
        )


def _check_numbers(config: GRPOConfig) -> None:
    positive = (
        "temperature",
        "num_iterations",
        "ref_model_sync_steps",
        "num_generations_eval",
        "dynamic_sampling_max_rounds",
        "importance_correction_cap",
    )
    for name in positive:
        if getattr(config, name) <= 0:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must be above 0")
    not_negative = ("beta", "epsilon", "max_batches_offpolicy", "entropy_coef")
    for name in not_negative:
        if getattr(config, name) < 0:
            raise ConfigError(f"{name} is {getattr(config, name)}; it must not be negative")
    _check_ranges(config)


def _check_ranges(config: GRPOConfig) -> None:
    if config.num_generations is not None and config.num_generations < 2:
        raise ConfigError(
            f"num_generations is {config.num_generations}; a group needs at least 2 completions to compare"
        )
    for name in ("max_completion_length", "max_prompt_length"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if not 0 <= config.min_completion_length <= config.completion_limit:
        raise ConfigError(
            f"min_completion_length is {config.min_completion_length}; it must lie between 0 and max_completion_length ({config.completion_limit})"
        )
    if config.trainable_layers is not None and config.trainable_layers < 1:
        raise ConfigError(f"trainable_layers is {config.trainable_layers}; it must be at least 1, or left out for all")
    if not 0.0 <= config.ref_model_mixup_alpha <= 1.0:
        raise ConfigError(f"ref_model_mixup_alpha is {config.ref_model_mixup_alpha}; it must lie between 0 and 1")
    if config.max_staleness is not None and config.max_staleness < 0:
        raise ConfigError(
            f"max_staleness is {config.max_staleness}; 0 is strictly on-policy, larger numbers allow that many versions"
        )
    if config.overlong_cache_length is not None and not 0 < config.overlong_cache_length <= config.completion_limit:
        raise ConfigError(
            f"overlong_cache_length is {config.overlong_cache_length}; it must lie between 1 and max_completion_length ({config.completion_limit})"
        )
    if config.deterministic and config.max_staleness and not config.rollout_server_url:
        raise ConfigError(
            f"deterministic=True with max_staleness={config.max_staleness}: sampling during the update depends on timing; set max_staleness=0"
        )
    if config.sync_ref_model and config.beta == 0.0:
        raise ConfigError("sync_ref_model=True with beta=0: there is no reference model to move; set beta above 0")


def _check_compile(config: GRPOConfig) -> None:
    if config.torch_compile:
        raise ConfigError(
            "torch_compile=True compiles the whole module, which the sampler shares; use compile_modules=True instead"
        )
    if config.compile_modules and config.gradient_checkpointing:
        raise ConfigError("compile_modules and gradient_checkpointing do not go together; leave one out")


def _check_exact(config: GRPOConfig) -> None:
    if not config.exact:
        return
    if config.sampler_kind != "engine":
        raise ConfigError(f"exact=True needs the embedded engine; the sampler is {config.sampler_kind!r}")
    if config.packing != "padded":
        raise ConfigError(f"exact=True works on padded rows; packing is {config.packing!r}: leave it out")
    for name in ("gradient_checkpointing", "compile_modules", "bf16", "fp16"):
        if getattr(config, name):
            advice = "load the model in that type instead" if name in ("bf16", "fp16") else "leave one out"
            raise ConfigError(f"exact=True and {name}=True do not go together; {advice}")


def _check_samplers(config: GRPOConfig) -> None:
    if config.use_vllm and config.use_vllm_server:
        raise ConfigError("use_vllm and use_vllm_server are both set; choose one")
    if config.sampler_kind == "vllm_server":
        if not config.vllm_host or not config.vllm_port:
            raise ConfigError(
                f"use_vllm_server needs vllm_host and vllm_port (got {config.vllm_host!r}, {config.vllm_port!r})"
            )
        if not config.num_vllm_clients or config.num_vllm_clients < 1:
            raise ConfigError(f"num_vllm_clients is {config.num_vllm_clients}; at least 1 server is needed")
    ahead = bool(config.max_staleness) and config.rollout_server_url is None
    if ahead and config.sampler_kind not in {"engine", "vllm_server"}:
        raise ConfigError(
            f"max_staleness={config.max_staleness} samples during the update, which {config.sampler_kind!r} cannot: use sampler='engine' or vLLM servers"
        )
    if config.vllm_guided_decoding_regex and config.sampler_kind not in {"vllm", "vllm_server"}:
        raise ConfigError(f"vllm_guided_decoding_regex works with vLLM only; the sampler is {config.sampler_kind!r}")
    if config.policy_server_port is not None and config.sampler_kind != "engine":
        raise ConfigError(
            f"policy_server_port serves the embedded engine; the sampler is {config.sampler_kind!r}; set sampler='engine'"
        )


def _check_batches(config: GRPOConfig) -> None:
    accumulation = config.gradient_accumulation_steps
    aggregation = config.generation_aggregation_steps
    if aggregation is not None and (aggregation < 1 or accumulation % aggregation):
        raise ConfigError(
            f"generation_aggregation_steps ({aggregation}) must divide gradient_accumulation_steps ({accumulation})"
        )
    steps, size = config.backprop_accumulation_steps, config.backprop_accumulation_micro_batch_size
    batch = config.per_device_train_batch_size
    if steps is not None and not 1 <= steps <= batch:
        raise ConfigError(
            f"backprop_accumulation_steps ({steps}) must lie between 1 and per_device_train_batch_size ({batch})"
        )
    if size is not None and size < 1:
        raise ConfigError(f"backprop_accumulation_micro_batch_size is {size}; it must be at least 1")
    if steps is not None and size is not None and -(-batch // steps) != size:
        raise ConfigError(
            f"backprop_accumulation_steps ({steps}) and backprop_accumulation_micro_batch_size ({size}) disagree for batches "
            f"of {batch}: give one of them, or {-(-batch // steps)} for the latter"
        )
