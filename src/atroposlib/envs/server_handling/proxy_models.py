"""Requests and replies of the proxy."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from atroposlib.envs.server_handling.server_config import APIServerConfig, ServerType

DEFAULT_MAX_TOKENS = 1024


class ChatMessage(BaseModel):
    """A message as agents send it."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatCompletionProxyRequest(BaseModel):
    """A chat request; sampling parameters that are not named here pass through."""

    model_config = ConfigDict(extra="allow")

    messages: list[ChatMessage]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    n: int = Field(default=1, ge=1)
    stop: str | list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    return_token_ids: bool = False

    def call_fields(self) -> dict[str, Any]:
        """What the managed session is called with."""
        fields = self.model_dump(
            exclude_none=True, exclude={"messages", "model", "stream", "stream_options", "logprobs"}
        )
        fields.pop("return_token_ids", None)
        if "max_completion_tokens" in fields:
            fields["max_tokens"] = fields.pop("max_completion_tokens")
        fields.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
        if isinstance(self.stop, str):
            fields["stop"] = [self.stop]
        return {**fields, "messages": self.plain_messages()}

    def plain_messages(self) -> list[dict[str, Any]]:
        """The messages as dicts without absent fields (content stays, as null)."""
        return [{"content": None, **message.model_dump(exclude_none=True)} for message in self.messages]


class SessionCreateRequest(BaseModel):
    """How a session records."""

    tool_parser: str = "hermes"
    track_tree: bool = False
    base_url: str | None = None
    preserve_think_blocks: bool = False


class SessionCreateResponse(BaseModel):
    """A new session."""

    uuid: str
    model_name: str
    tool_parser: str
    base_url: str | None = None
    created_at: float


class RenderResponse(BaseModel):
    """The prompt a conversation becomes."""

    prompt_text: str
    token_ids: list[int]
    num_tokens: int


class BackendServer(BaseModel):
    """One backend of ``/setup``."""

    base_url: str
    api_key: str | None = None
    server_type: ServerType = "vllm"
    num_max_requests_at_once: int = 512
    num_requests_for_eval: int = 64
    timeout: int = 1200


class SetupRequest(BaseModel):
    """New backends for the proxy."""

    model_config = ConfigDict(protected_namespaces=())

    model_name: str
    servers: list[BackendServer]
    tokenizer_name: str | None = None

    def server_configs(self) -> list[APIServerConfig]:
        """The backends as server settings."""
        shared: dict[str, Any] = {"model_name": self.model_name, "tokenizer_name": self.tokenizer_name or "none"}
        return [APIServerConfig(**server.model_dump(), **shared) for server in self.servers]
