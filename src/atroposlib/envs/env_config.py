"""``BaseEnvConfig``: every setting of an environment, with its documentation.

Unknown keyword arguments are ignored in code (old environments pass some) and instances stay mutable: the
loop writes what the trainer announces into them. On the command line and in YAML an unknown name is an error.
"""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel, ConfigDict, Field


class EvalHandlingEnum(str, Enum):  # noqa: UP042 - str(value) of the old enum is "EvalHandlingEnum.NONE"
    """What happens to training rollouts while an evaluation runs."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class BaseEnvConfig(BaseModel):
    """Settings of one environment process.

    Example: ``BaseEnvConfig(group_size=8, tokenizer_name="Qwen/Qwen3-0.6B", wandb_name="gsm8k")``
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    group_size: int = Field(
        default=4, description="How many rollouts of one item are made together and scored as one group."
    )
    max_num_workers: int = Field(
        default=-1,
        description="Most groups in flight at once. -1: max_num_workers_per_node x number of inference servers.",
    )
    max_eval_workers: int = Field(
        default=16, description="Most evaluation tasks at once in the base class's evaluation pool (gather_eval)."
    )
    max_num_workers_per_node: int = Field(
        default=8, description="Groups in flight per inference server; used when max_num_workers is -1."
    )
    steps_per_eval: int = Field(
        default=100, description="Evaluate whenever the trainer's step passes a multiple of this; 0 or less: never."
    )
    max_token_length: int = Field(
        default=2048,
        description="Longest sequence this environment makes; sent at registration and used for its share of the inference slots.",
    )
    eval_handling: EvalHandlingEnum = Field(
        default=EvalHandlingEnum.STOP_TRAIN,
        description=(
            "During an evaluation: STOP_TRAIN cancels training rollouts (their items are done again afterwards), "
            "LIMIT_TRAIN keeps eval_limit_ratio of the workers, NONE changes nothing."
        ),
    )
    eval_limit_ratio: float = Field(
        default=0.5, description="Share of the training workers that go on during an evaluation under LIMIT_TRAIN."
    )
    inference_weight: float = Field(
        default=1.0,
        description=(
            "Share of the inference slots among the environments of one rollout server (weight x max_token_length, "
            "normalised). -1: this environment ignores the share."
        ),
    )
    batch_size: int = Field(
        default=-1,
        description="Sequences per training batch; the trainer's value wins, this one is used when it gives none.",
    )
    max_batches_offpolicy: int = Field(
        default=3,
        description="Stop starting rollouts while this many batches wait for the trainer; 0 or less: no limit.",
    )
    tokenizer_name: str = Field(
        default="NousResearch/DeepHermes-3-Llama-3-3B-Preview",
        description="Tokenizer to load: a hub id or a local folder.",
    )
    use_wandb: bool = Field(default=True, description="Log to Weights & Biases. False: wandb is not even imported.")
    rollout_server_url: str = Field(default="http://localhost:8000", description="Where scored groups go.")
    total_steps: int = Field(
        default=1000,
        description="serve: stop when the trainer is this far (-1: the trainer's own number). process: groups to make.",
    )
    wandb_name: str | None = Field(
        default=None,
        description="Name of this environment: prefix of the wandb run and of the metrics. Default: its class's name.",
    )
    num_rollouts_to_keep: int = Field(default=32, description="Groups kept for the table of rollouts.")
    num_rollouts_per_group_for_logging: int = Field(
        default=1, description="Rollouts of each group that go into that table; -1: all."
    )
    ensure_scores_are_not_same: bool = Field(
        default=True, description="Reject (and count) a group whose scores are all equal: it teaches nothing."
    )
    data_path_to_save_groups: str | None = Field(
        default=None, description="Write every group to this JSONL file; an existing file is never overwritten."
    )
    data_dir_to_save_evals: str | None = Field(
        default=None, description="Folder for metrics.json and samples.jsonl of evaluations."
    )
    min_items_sent_before_logging: int = Field(
        default=2,
        description="Log metrics at a new step only after this many groups were sent; 0 or less: at every step.",
    )
    include_messages: bool = Field(
        default=False,
        description="Send messages with each group; made from the decoded tokens where the group has none.",
    )
    min_batch_allocation: float | None = Field(
        default=None, description="Smallest share of every batch that must come from this environment (0 to 1)."
    )
    worker_timeout: float = Field(
        default=600,
        description="Seconds one group may take; then it is cancelled and its item is tried once more. 0 or less: no limit.",
    )
    thinking_mode: bool = Field(default=False, description="Ask the inference servers to reason before answering.")
    reasoning_effort: str | None = Field(
        default=None, description="Reasoning effort: none, minimal, low, medium, high or xhigh; turns reasoning on."
    )
    max_reasoning_tokens: int | None = Field(
        default=None, ge=1024, le=32000, description="Most reasoning tokens (1024 to 32000); turns reasoning on."
    )
    custom_thinking_prompt: str | None = Field(
        default=None, description="Text an environment may use to ask for reasoning; the base class does not use it."
    )
