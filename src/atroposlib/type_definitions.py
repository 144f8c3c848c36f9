"""The vocabulary of environments: messages, scored groups, game and evaluation records.

Everything here is a plain dict at run time (``TypedDict``) and this module imports nothing but ``typing``.

Conventions inside a group: ``masks`` repeat the token id where a position is trained and hold -100 elsewhere;
``inference_logprobs`` hold the sampler's log-probability where trained and 1.0 elsewhere.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

Content: TypeAlias = str | list[Any]
"""Text, or a list of OpenAI content parts (text, image_url, ...)."""

Item: TypeAlias = Any
"""What ``get_next_item`` returns and ``collect_trajectories`` takes."""

number: TypeAlias = int | float
UUID: TypeAlias = str


class Message(TypedDict, total=False):
    """One chat message; ``role`` and ``content`` are always there."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Content
    reward: float | None


class ScoredDataGroup(TypedDict, total=False):
    """The rollouts of one item, ready to train on (S sequences of L tokens each).

    Example: ``group = ScoredDataGroup(); group["tokens"] = [[1, 2]]``
    """

    tokens: list[list[int]]  # [S][L]
    masks: list[list[int]]  # [S][L], -100 = not trained
    scores: list[float]  # [S]
    advantages: list[list[float]] | None  # [S][L]
    ref_logprobs: list[list[float]] | None  # [S][L]
    messages: list[list[Message]] | None  # [S][turns]
    generation_params: dict[str, Any] | None
    inference_logprobs: list[list[float]] | None  # [S][L], 1.0 = not trained
    group_overrides: dict[str, Any] | None
    overrides: list[dict[str, Any]] | None  # [S]
    images: Any
    distill_token_ids: list[list[list[int]]] | None  # [S][L][k]
    distill_logprobs: list[list[list[float]]] | None  # [S][L][k]
    group_id: str
    policy_versions: list[list[int]]  # [S][distinct versions, ascending]
    reward_components: dict[str, list[float]]  # name -> [S]


class ScoredDataItem(TypedDict, total=False):
    """One scored rollout (L tokens); ``group_size`` of them make a group."""

    tokens: list[int]  # [L]
    masks: list[int]  # [L]
    scores: float
    advantages: list[float] | None  # [L]
    ref_logprobs: list[float] | None  # [L]
    messages: list[Message] | None
    generation_params: dict[str, Any] | None
    inference_logprobs: list[float] | None  # [L]
    group_overrides: dict[str, Any] | None
    overrides: dict[str, Any] | None
    images: Any
    distill_token_ids: list[list[int]] | None  # [L][k]
    distill_logprobs: list[list[float]] | None  # [L][k]
    policy_versions: list[int]
    reward_components: dict[str, float]


class AgentStep(TypedDict, total=False):
    """What one agent said in one step, and its reward."""

    step: int
    messages: list[Message]
    reward: float


AgentHistory: TypeAlias = dict[str, list[AgentStep]]
"""Agent name -> its steps in order."""


class Observation(TypedDict):
    """What an agent sees: the raw state and how it is shown to the model."""

    raw: dict[str, Any]
    rendered: Content


class GameStep(TypedDict, total=False):
    """One step of a game with several agents."""

    step: int
    observation: Observation
    agent_id: str
    action: str
    reward: float | dict[str, float]
    done: bool
    info: dict[str, Any]


GameHistory: TypeAlias = list[GameStep]


class EvaluationConfigGeneral(TypedDict, total=False):
    """The ``config_general`` part of ``metrics.json``."""

    model_name: str
    total_evaluation_time_seconds: str
    generation_parameters: dict[str, Any]


EvaluationResults: TypeAlias = dict[str, dict[str, float]]
"""Task key (``atropos|name|0`` or ``all``) -> metric name -> value."""


class EvaluationMetrics(TypedDict):
    """The whole of ``metrics.json``."""

    config_general: EvaluationConfigGeneral
    results: EvaluationResults


class EvaluationSample(TypedDict, total=False):
    """One line of ``samples.jsonl``; environments add keys of their own."""

    messages: list[Message] | None
    question: str | None
    gold_answer: str | None
    gold_parsed: str | None
    model_parsed: str | None
    score: float | None
    correct: bool | None
    finish_reason: str | None
    response_after_think: str | None
