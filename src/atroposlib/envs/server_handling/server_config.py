"""Settings of inference servers: plain, mutable pydantic models and the reasoning options.

Unknown keyword arguments are ignored on purpose: published environments pass keys of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

OFFICIAL_API_URL = "https://api.openai.com/v1"
OFFICIAL_API_HOST = "api.openai.com"
VALID_REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

ServerType = Literal["openai", "trl", "sglang", "vllm"]


class ServerBaseline(BaseModel):
    """What servers that are found rather than listed have in common (Slurm nodes, or ports 9004 to 9007 of this machine).

    Example: ``ServerBaseline(model_name="Qwen/Qwen3-4B", server_type="vllm")``
    """

    model_config = ConfigDict(protected_namespaces=())

    timeout: int = Field(default=1200, gt=0, description="Seconds until a request fails with a time-out.")
    num_max_requests_at_once: int = Field(
        default=512,
        gt=0,
        description="Training requests in flight to this server at most; a request with n completions is one, so divide by n.",
    )
    num_requests_for_eval: int = Field(
        default=64, ge=0, description="Evaluation requests in flight at most; 0 counts as 1."
    )
    model_name: str = Field(default="default", description="Sent as `model`.")
    rolling_buffer_length: int = Field(default=1000, gt=0, description="How many timings the server metrics keep.")
    server_type: ServerType = Field(default="openai", description="Which protocol the server speaks.")
    tokenizer_name: str = Field(default="none", description="Tokenizer for token-exact calls; 'none' uses model_name.")
    server_wait_s: float = Field(
        default=600.0, ge=0, description="How long a call waits for a server that is down before it fails."
    )


class APIServerConfig(ServerBaseline):
    """One inference server. ``base_url=None`` is the official OpenAI API.

    Example: ``APIServerConfig(model_name="my-model", base_url="http://localhost:9001/v1", server_type="vllm")``
    """

    api_key: str | None = Field(
        default=None, description="Sent as bearer token; None reads OPENAI_API_KEY, for the official API only."
    )
    base_url: str | None = Field(default=None, description="URL of the endpoint with /v1; None is the official API.")
    n_kwarg_is_ignored: bool = Field(default=False, description="Ask n completions as n requests.")
    health_check: bool = Field(default=True, description="Watch the server and wait for it when it is down.")

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, ("***" if name == "api_key" and value else value)


OpenaiConfig = APIServerConfig


@dataclass
class ReasoningConfig:
    """How much a reasoning model may think, in the words each provider understands."""

    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None

    EFFORT_TO_MAX_TOKENS: ClassVar[dict[str, int]] = {
        "none": 1024,
        "minimal": 3200,
        "low": 6400,
        "medium": 16000,
        "high": 25600,
        "xhigh": 30400,
    }
    FALLBACK_MAX_TOKENS: ClassVar[int] = 8192

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in VALID_REASONING_EFFORTS:
            raise ValueError(
                f"Invalid reasoning_effort: {self.effort!r}; use one of {', '.join(VALID_REASONING_EFFORTS)}"
            )
        if self.effort is not None or self.max_tokens is not None:
            self.enabled = True

    @classmethod
    def from_env_config(cls, env_config: Any) -> ReasoningConfig:
        """Read the reasoning fields of an environment's configuration (each may be absent)."""
        return cls(
            enabled=getattr(env_config, "thinking_mode", False),
            effort=getattr(env_config, "reasoning_effort", None),
            max_tokens=getattr(env_config, "max_reasoning_tokens", None),
        )

    def is_reasoning_kwargs_active(self) -> bool:
        """Whether requests carry reasoning settings."""
        return self.enabled

    def build_extra_body(self, base_url: str | None = None, use_max_tokens: bool = False) -> dict[str, Any] | None:
        """The extra request fields for the provider behind ``base_url``; None when reasoning is off."""
        if not self.enabled:
            return None
        if base_url and OFFICIAL_API_HOST in base_url:
            return {"reasoning_effort": self.effort or "medium"}
        reasoning: dict[str, Any] = {"enabled": True}
        if self.effort is not None:
            if use_max_tokens:
                reasoning["max_tokens"] = self.EFFORT_TO_MAX_TOKENS.get(self.effort, self.FALLBACK_MAX_TOKENS)
            else:
                reasoning["effort"] = self.effort
        elif self.max_tokens is not None:
            reasoning["max_tokens"] = self.max_tokens
        return {"reasoning": reasoning}
