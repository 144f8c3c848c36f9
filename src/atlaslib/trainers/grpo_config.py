# ruff: noqa: RUF009 (parameter() returns a dataclass field)
"""``GRPOConfig``: every parameter of a training run.

Extends ``transformers.TrainingArguments``; where a default is stated here it wins over the inherited one. A parameter that
cannot work in a given setting raises and says why; none is accepted and ignored.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from atlaslib.errors import ConfigError
from atlaslib.trainers.config_checks import check_config

logger = logging.getLogger(__name__)


def parameter(default: Any, documentation: str) -> Any:
    """A field with its documentation; ``atropos train --help`` reads both from this file without importing it."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": documentation})
    return field(default=default, metadata={"help": documentation})


@dataclass
class GRPOConfig(TrainingArguments):  # type: ignore[misc]
    """Parameters of :class:`~atlaslib.trainers.grpo.GRPOTrainer`.

    Example: ``GRPOConfig(output_dir="out", model_name_or_path="my/model", num_generations=8, beta=0.0)``
    """

    # --- model and optimisation (documented defaults) ---
    model_name_or_path: str | None = parameter(
        None,
        "The policy: a model folder or hub id. May be left out when a model is handed to the trainer.",
    )
    model_init_kwargs: dict[str, Any] | None = parameter(
        None,
        "Keyword arguments for from_pretrained when the model is given by name (also for the reference and "
        "reward models).",
    )
    learning_rate: float = parameter(1e-6, "Initial learning rate of AdamW.")
    num_train_epochs: float = parameter(3, "Passes over the prompts.")
    per_device_train_batch_size: int = parameter(8, "Completions per device in one micro-step.")
    weight_decay: float = parameter(0.01, "Weight decay of the optimizer.")
    warmup_ratio: float = parameter(
        0.1,
        "Share of the steps over which the learning rate ramps up; warmup_steps wins when set.",
    )
    logging_steps: float = parameter(10, "Log to the trackers every that many steps (the JSONL gets every step).")
    eval_steps: float | None = parameter(500, "Evaluate every that many steps when eval_strategy is 'steps'.")
    save_total_limit: int | None = parameter(3, "Checkpoints kept.")
    load_best_model_at_end: bool = parameter(
        True,
        "Load the best checkpoint after training; takes effect when an evaluation is configured.",
    )
    metric_for_best_model: str | None = parameter("eval_reward", "Metric that decides which checkpoint is best.")
    greater_is_better: bool | None = parameter(True, "Whether a larger metric is better.")
    report_to: str | list[str] | None = parameter(
        ["wandb"],
        "Trackers: wandb, tensorboard, trackio, ...; wandb falls back to none with a warning when absent or "
        "not configured.",
    )
    remove_unused_columns: bool | None = parameter(
        False,
        "True drops every column but the prompt before reward functions see it.",
    )

    # --- the algorithm ---
    beta: float = parameter(0.04, "Weight of the KL term to the reference; 0 = no reference model is loaded or run.")
    temperature: float = parameter(0.9, "Sampling temperature; the log-probs in the ratio use the same.")
    num_generations: int | None = parameter(
        8,
        "Completions per prompt, the group of the advantage; None = the whole batch is one group.",
    )
    num_generations_eval: int = parameter(1, "Completions per prompt in evaluation.")
    max_completion_length: int | None = parameter(256, "Longest completion in tokens.")
    min_completion_length: int = parameter(0, "No completion ends before that many tokens.")
    max_prompt_length: int | None = parameter(
        512,
        "Longest prompt in tokens; longer ones lose their beginning. None = never cut.",
    )
    reward_weights: list[float] | None = parameter(None, "Weight of each reward function; None = 1 for each.")
    loss_type: str = parameter("grpo", "grpo, dr_grpo, dapo, bnpo, gspo, cispo, rloo or reinforce++.")
    epsilon: float = parameter(0.2, "Lower clip of the ratio.")
    epsilon_high: float | None = parameter(None, "Upper clip; None = epsilon (dapo 0.28, cispo 4.0).")
    delta: float | None = parameter(None, "Two-sided clipping: upper bound of the ratio also for negative advantages.")
    num_iterations: int = parameter(1, "Optimizer steps on each generated batch.")
    scale_rewards: str | None = parameter(
        None,
        "Divide centred rewards by the standard deviation of the 'group' or 'batch', or 'none'; None = what "
        "the loss type prescribes (group; dr_grpo: none).",
    )
    kl_estimator: str = parameter("k3", "k1, k2 or k3.")
    entropy_coef: float = parameter(0.0, "Weight of an entropy bonus.")
    importance_correction: str = parameter(
        "none",
        "For sampler and trainer disagreeing on the same weights: none, tis (truncated) or mis (masked).",
    )
    importance_correction_cap: float = parameter(2.0, "Cap of the importance weight.")
    importance_correction_level: str = parameter("token", "token or sequence.")
    mask_truncated_completions: bool = parameter(False, "Completions cut by the length limit carry no loss.")
    overlong_cache_length: int | None = parameter(
        None,
        "DAPO's soft punishment: the last that many tokens before max_completion_length cost up to -1 reward."
        " None = off.",
    )
    dynamic_sampling: bool = parameter(
        False,
        "Drop groups whose rewards are all equal and sample further prompts to refill the batch.",
    )
    dynamic_sampling_max_rounds: int = parameter(4, "At most that many rounds of refilling per batch.")
    unbias_log_probabilities: bool = parameter(
        True,
        "Log-probs at the sampling temperature (True) or at temperature 1 (False), for policy, sampler and "
        "reference alike.",
    )
    distill_coef: float = parameter(1.0, "Weight of the distillation term of samples that carry teacher log-probs.")
    sync_ref_model: bool = parameter(False, "Move the reference towards the policy during training.")
    ref_model_mixup_alpha: float = parameter(0.9, "reference = alpha * policy + (1 - alpha) * reference.")
    ref_model_sync_steps: int = parameter(64, "Steps between two reference updates.")
    artificial_epochs: int | None = parameter(1, "Permutations of the prompts chained into one epoch.")
    trainable_layers: int | None = parameter(
        None,
        "Train only the last that many layers and the final norm; what lies below (and the head) stays as it is and costs no "
        "backward pass (unless gradient_checkpointing is on) and no optimizer state. None = everything.",
    )
    disable_dropout: bool = parameter(
        True,
        "Set every dropout of the policy to 0, so that its log-probs are those of the sampler.",
    )

    # --- sampling ---
    top_k: int | None = parameter(None, "Sample from the k most likely tokens.")
    top_p: float = parameter(1.0, "Nucleus sampling threshold.")
    min_p: float | None = parameter(None, "Least probability relative to the most likely token.")
    repetition_penalty: float = parameter(1.0, "Penalty on tokens that already occurred.")
    chat_template_kwargs: dict[str, Any] | None = parameter(None, "Further arguments for the chat template.")
    generation_aggregation_steps: int | None = parameter(
        None,
        "One generation round serves that many micro-steps; None = all of an optimizer step.",
    )
    shuffle_generation_inputs: bool = parameter(False, "Permute prompts before generation; results return in order.")
    sampler: str = parameter(
        "auto",
        "engine (embedded), transformers, vllm, vllm_server; auto = what use_vllm and use_vllm_server say, "
        "else the embedded engine.",
    )
    use_vllm: bool | None = parameter(False, "Sample with vLLM in this process.")
    use_vllm_server: bool = parameter(False, "Sample with vLLM server(s) at vllm_host:vllm_port.")
    vllm_device: str | None = parameter("auto", "Device of the in-process vLLM: auto, or for instance cuda:1.")
    vllm_gpu_memory_utilization: float = parameter(0.9, "Share of the GPU memory for the in-process vLLM.")
    vllm_dtype: str | None = parameter("auto", "Data type of the in-process vLLM.")
    vllm_max_model_len: int | None = parameter(None, "Longest sequence of the in-process vLLM.")
    vllm_host: str | None = parameter(None, "Host of the vLLM server(s).")
    vllm_port: int | None = parameter(None, "Port of the first vLLM server; client i uses port + i.")
    vllm_group_port: int | None = parameter(
        51216,
        "Kept for old configurations; weights are pushed through a folder, so another value is an error.",
    )
    vllm_server_timeout: float = parameter(120.0, "Seconds to wait for a vLLM server to answer.")
    num_vllm_clients: int | None = parameter(1, "Number of vLLM servers.")
    vllm_weights_dir: str | None = parameter(
        None,
        "Folder both sides see, for pushing weights to vLLM servers; None = output_dir/vllm_weights.",
    )
    vllm_probe_tolerance: float = parameter(
        0.05,
        "Largest mean log-prob difference between vLLM and the trainer after a weight push.",
    )
    vllm_guided_decoding_regex: str | None = parameter(
        None,
        "Completions follow this regular expression (vLLM samplers only).",
    )
    vllm_sleep_level: int = parameter(1, "Sleep level of the in-process vLLM between rounds (0 = never sleeps).")
    enforce_eager: bool = parameter(True, "In-process vLLM without captured graphs.")
    enable_prefix_caching: bool = parameter(
        False,
        "Prefix caching of the in-process vLLM (the embedded engine always shares prefixes).",
    )
    use_ray: bool | None = parameter(
        False,
        "Not available: raises. Start servers with Ray and use vLLM servers instead.",
    )
    ray_share_training_devices: bool | None = parameter(False, "Not available: raises.")
    ray_tensor_parallelism: int = parameter(1, "Not available: raises when changed.")
    ray_data_parallelism: int | None = parameter(None, "Not available: raises when set.")
    ray_no_memory_duplication: bool | None = parameter(False, "Not available: raises.")

    # --- rollouts from environments ---
    rollout_server_url: str | None = parameter(
        None,
        "Take batches from this rollout server instead of sampling prompts here.",
    )
    rollout_server_token: str | None = parameter(None, "Bearer token of the rollout server.")
    rollout_batch_size: int | None = parameter(
        None,
        "Sequences per batch asked of the rollout server; None = one optimizer step's worth.",
    )
    rollout_wait_timeout_s: float = parameter(
        600.0,
        "A batch that does not come within this time is an error that says who is waited for.",
    )
    rollout_max_token_len: int | None = parameter(
        None,
        "Longest sequence announced to environments; None = max_prompt_length + max_completion_length.",
    )
    max_batches_offpolicy: int = parameter(
        3,
        "Batches an environment may be ahead of the trainer: the default of max_staleness with a rollout server, and what "
        "`atropos run` tells its environments.",
    )
    max_staleness: int | None = parameter(
        None,
        "Samples whose oldest token is more policy versions behind are refused and counted. None = 0 in "
        "process (sampling and update take turns), max_batches_offpolicy with a rollout server. In process, n"
        " > 0 samples up to n batches ahead during the update.",
    )
    policy_server_port: int | None = parameter(
        None,
        "Serve the policy being trained on this port from this process (OpenAI routes and /generate), so "
        "environments sample from the live weights. 0 = any free port.",
    )
    policy_server_host: str = parameter("127.0.0.1", "Address of the policy server.")
    policy_model_name: str = parameter("policy", "Model name of the policy server.")

    # --- memory and speed ---
    offload_untrained_models: bool = parameter(False, "Reference and reward models stay on the CPU outside their use.")
    ds3_gather_for_generation: bool = parameter(True, "DeepSpeed ZeRO-3: gather the weights for generation.")
    backprop_accumulation_steps: int | None = parameter(
        None,
        "Cut each micro-step into that many pieces, each with its own backward pass: same gradients, less memory.",
    )
    backprop_accumulation_micro_batch_size: int | None = parameter(
        None,
        "The same, by the most sequences in one piece.",
    )
    skip_zero_advantages: bool = parameter(
        True,
        "Samples that cannot change the gradient (advantage 0, no KL or entropy term) are counted but not computed.",
    )
    packing: str = parameter("auto", "padded, packed, shared_prefix, or auto.")
    logprob_chunk_size: int | None = parameter(
        None,
        "Positions whose logits are held at a time; None = by a memory budget.",
    )
    compile_modules: bool | None = parameter(
        None,
        "Compile the decoder layers for the update; the sampler is not affected. None = with one process on a GPU, unless "
        "gradient_checkpointing or deterministic is on.",
    )
    engine_kwargs: dict[str, Any] | None = parameter(None, "Settings of the embedded engine (EngineConfig fields).")

    # --- determinism and records ---
    exact: bool = parameter(
        False,
        "The embedded engine and the update sum in the same order, so that log-probs of sampler and trainer are equal to the "
        "last bit; slower. Rows are padded; not with gradient_checkpointing, autocast (bf16, fp16), compile_modules, FSDP or DeepSpeed.",
    )
    deterministic: bool = parameter(
        False,
        "Deterministic kernels and per-completion seeds: a run that is killed and resumed equals the "
        "uninterrupted one.",
    )
    metrics_file: str | None = parameter(
        "metrics.jsonl",
        "Every step's metrics as JSON lines, below output_dir; None = off.",
    )
    log_completions: bool = parameter(False, "Log a table of completions to the trackers at logging steps.")
    save_completions_probability: float | None = parameter(
        None,
        "Share of the completions stored as CSV under output_dir/stored_completions.",
    )
    activate_debugging_logs: bool = parameter(False, "Log each phase of a step with its time and memory.")

    # --- teaching ---
    max_probe_tokens: int | None = parameter(500, "Longest diagnostic probe of the student.")
    student_diagnostic_template: str | None = parameter(None, "Prompt of the probe; placeholder {question}.")
    teacher_adaptive_template: str | None = parameter(
        None,
        "Prompt of the teacher; placeholders {question} {approach} and the context ones.",
    )
    student_with_teaching_template: str | None = parameter(
        None,
        "Prompt of the taught student; placeholders {question} {teaching} and the context ones.",
    )
    student_baseline_template: str | None = parameter(None, "Prompt of the untaught student; placeholder {question}.")

    def __post_init__(self) -> None:
        self._resolve_best_model()
        self.report_to = resolve_trackers(self.report_to)
        if self.deterministic:
            self.full_determinism = True
        if self.exact:
            self.packing = "padded" if self.packing == "auto" else self.packing
            self.compile_modules = bool(self.compile_modules)
        super().__post_init__()
        check_config(self)

    def _resolve_best_model(self) -> None:
        """``load_best_model_at_end`` needs an evaluation; with one, the save strategy follows the eval strategy."""
        me: Any = self
        strategy = str(getattr(me.eval_strategy, "value", me.eval_strategy))
        if not me.load_best_model_at_end:
            return
        if strategy == "no":
            logger.info("load_best_model_at_end has no effect: no evaluation is configured (eval_strategy='no')")
            me.load_best_model_at_end = False
            return
        if str(getattr(me.save_strategy, "value", me.save_strategy)) != "best":
            me.save_strategy = strategy
        eval_steps = me.eval_steps or me.logging_steps
        if strategy == "steps" and me.save_steps >= 1 and eval_steps >= 1 and me.save_steps % eval_steps:
            aligned = math.ceil(me.save_steps / eval_steps) * eval_steps
            logger.info(
                "save_steps %s becomes %s, a multiple of eval_steps %s, so that the best model can be saved",
                me.save_steps,
                aligned,
                eval_steps,
            )
            me.save_steps = aligned

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """``warmup_steps`` when set (below 1: a share), else ``warmup_ratio`` of all steps."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * (self.warmup_steps or self.warmup_ratio))

    @property
    def completion_limit(self) -> int:
        """``max_completion_length`` as a number."""
        return self.max_completion_length if self.max_completion_length is not None else 256

    @property
    def staleness_bound(self) -> int:
        """``max_staleness`` with its default filled in."""
        if self.max_staleness is not None:
            return self.max_staleness
        return self.max_batches_offpolicy if self.rollout_server_url else 0

    @property
    def sampler_kind(self) -> str:
        """Which sampler the settings choose."""
        if self.sampler != "auto":
            return self.sampler
        if self.use_vllm_server:
            return "vllm_server"
        return "vllm" if self.use_vllm else "engine"

    def require_model_name(self) -> str:
        """The model's name, or an error that says where to put it."""
        if not self.model_name_or_path:
            raise ConfigError("no policy: give model_name_or_path in the config, or a model to the trainer (model=...)")
        return self.model_name_or_path


def resolve_trackers(report_to: str | list[str] | None) -> str | list[str] | None:
    """``report_to`` without wandb when wandb cannot work here; says so once."""
    if report_to is None:
        return "none"
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    if "wandb" not in names:
        return report_to
    reason = wandb_obstacle()
    if reason is None:
        return names
    logger.warning("report_to: wandb is left out, %s; metrics still go to the JSONL file", reason)
    return [name for name in names if name != "wandb"] or "none"


def wandb_obstacle() -> str | None:
    """Why wandb cannot be used here, or None."""
    if importlib.util.find_spec("wandb") is None:
        return "the package is not installed (pip install 'atropos-atlas[wandb]')"
    if os.environ.get("WANDB_MODE", "").lower() in {"offline", "disabled", "dryrun"} or os.environ.get("WANDB_API_KEY"):
        return None
    for name in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        path = Path(name).expanduser() if name else None
        if path is not None and path.is_file() and "wandb" in path.read_text(errors="replace"):
            return None
    return "it is not configured (no WANDB_API_KEY, no login, WANDB_MODE is not offline)"
