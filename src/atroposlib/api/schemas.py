"""The wire protocol's field names and request models.

The fast path (`atroposlib.api.wire`) reads well-formed bodies without these models; they serve the OpenAPI page, the routes
that are called rarely, and bodies that only a lenient reader takes (numbers written as strings, unknown extra fields).
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

GROUP_FIELDS = (
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "messages",
    "generation_params",
    "inference_logprobs",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
)
"""Every group in a batch has exactly these keys (null when absent), plus those of `EXTRA_FIELDS` that were posted."""

EXTRA_FIELDS = ("group_id", "policy_versions", "reward_components")
"""Optional additions: absent from a batch when absent from the post."""

BINARY_TYPE = "application/vnd.atropos+msgpack"
"""Content type of the binary form (see `atroposlib.api.binary`)."""

EMPTY_EXAMPLE: dict[str, list[Any]] = {
    name: []
    for name in (
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "generation_params",
        "inference_logprobs",
        "messages",
        "images",
    )
}
"""What `/latest_example` answers before the first group."""


class Registration(BaseModel):
    """A trainer announces itself. Registering again takes effect: settings and step count are replaced."""

    wandb_group: str
    wandb_project: str
    batch_size: int = Field(gt=0, description="sequences in a batch")
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int
    resume_after: int | None = Field(
        default=None,
        ge=0,
        description="batch_seq the trainer's checkpoint contains: the batches after it are delivered again",
    )


class RegisterEnv(BaseModel):
    """An environment announces itself; one that was gone gets its old id and name back."""

    max_token_length: int
    desired_name: str | None = None
    weight: float = Field(default=1.0, allow_inf_nan=False)
    group_size: int = Field(gt=0)
    min_batch_allocation: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class EnvIdentifier(BaseModel):
    """Which environment speaks."""

    env_id: int


class Message(BaseModel):
    """A chat message; extra keys are kept."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any
    reward: float | None = None


class ScoredData(BaseModel):
    """One scored group of S sequences (see the module docstring of `atroposlib.type_definitions` for the conventions)."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any | None = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None
    group_id: str | None = Field(default=None, max_length=512, description="the same id twice is stored once")
    policy_versions: list[list[int]] | None = Field(
        default=None, description="per sequence: the policy versions that made it"
    )
    reward_components: dict[str, list[float]] | None = Field(default=None, description="name -> one value per sequence")


class Status(BaseModel):
    """Answer of `/status`."""

    current_step: int
    queue_size: int


class Info(BaseModel):
    """Answer of `/info`."""

    batch_size: int
    max_token_len: int


class BatchAck(BaseModel):
    """A trainer has used this batch and all before it."""

    batch_seq: int = Field(ge=0)


class BatchCommit(BaseModel):
    """A trainer's checkpoint contains this batch and all before it: they are never asked for again."""

    batch_seq: int = Field(ge=0)
    step: int


class MetricsReport(BaseModel):
    """Numbers any process wants on the live page."""

    source: str = Field(max_length=256)
    step: int = Field(ge=-(2**63), lt=2**63)
    time: float | None = None
    metrics: dict[str, float]
