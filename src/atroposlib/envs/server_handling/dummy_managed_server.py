"""Stand-ins round a managed session: one that records placeholders, and one that looks like an openai client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from atroposlib.envs.server_handling.chat_prompts import plain_messages
from atroposlib.envs.server_handling.sequence_tree import IGNORED, SequenceNode

NUM_DUMMY_TOKENS = 128
DUMMY_LOGPROB = -0.5


class DummyManagedServer:
    """The interface of ``ManagedServer`` over a server that gives no token ids: texts are real, tokens are placeholders.

    For evaluation and data generation only; every node says ``dummy_tokens`` in its metadata.
    """

    def __init__(self, server: Any, tokenizer: Any = None, track_tree: bool = False) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self.track_tree = track_tree
        self.current_nodes: list[SequenceNode] = []
        self.sequences: dict[str, SequenceNode] = {}

    async def chat_completion(self, **kwargs: Any) -> Any:
        """Ask the server and record the texts."""
        reply = await self.server.chat_completion(**kwargs)
        shown = plain_messages(kwargs["messages"])
        for choice in reply.choices:
            messages = [*shown, {"role": "assistant", "content": choice.message.content}]
            self._record("\n\n".join(f"{m['role']}:{m.get('content')}" for m in messages), choice.finish_reason)
        return reply

    async def completion(self, **kwargs: Any) -> Any:
        """Ask the server and record the texts."""
        reply = await self.server.completion(**kwargs)
        for choice in reply.choices:
            self._record(f"{kwargs['prompt']}{choice.text}", choice.finish_reason)
        return reply

    async def get_logprobs(self, **kwargs: Any) -> Any:
        """Not available without token ids."""
        raise NotImplementedError("a session with placeholder tokens does not implement get_logprobs")

    def _record(self, full_text: str, finish_reason: Any) -> None:
        node = SequenceNode(
            full_text=full_text,
            tokens=list(range(NUM_DUMMY_TOKENS)),
            masked_tokens=[IGNORED, *range(1, NUM_DUMMY_TOKENS)],
            logprobs=[DUMMY_LOGPROB] * NUM_DUMMY_TOKENS,
            metadata={"finish_reason": finish_reason, "dummy_tokens": True},
        )
        self.current_nodes.append(node)
        self.sequences[full_text] = node

    def get_state(self) -> dict[str, Any]:
        """As ``ManagedServer.get_state``."""
        if self.track_tree:
            return {"sequences": dict(self.sequences), "tree": dict(self.sequences)}
        return {"nodes": list(self.current_nodes)}

    def reset(self) -> None:
        """Forget the record."""
        self.current_nodes = []
        self.sequences = {}


class _Creator:
    """An object with one method, ``create``."""

    def __init__(self, create: Callable[..., Awaitable[Any]]) -> None:
        self.create = create


class _Chat:
    """The ``chat`` part of an openai client."""

    def __init__(self, create: Callable[..., Awaitable[Any]]) -> None:
        self.completions = _Creator(create)


class ManagedServerAdapter:
    """Looks like ``openai.AsyncOpenAI`` to code that only creates completions; every call goes to the session.

    Example: ``ManagedServerAdapter(managed, "http://localhost/v1").chat.completions.create(messages=[...])``
    """

    def __init__(self, managed_server: Any, base_url: str | None = None) -> None:
        self.managed_server = managed_server
        self.base_url = base_url
        self.chat = _Chat(managed_server.chat_completion)
        self.completions = _Creator(managed_server.completion)

    async def post(self, *args: Any, **kwargs: Any) -> Any:
        """Not available: only completions are recorded."""
        raise NotImplementedError(
            "raw requests would not be recorded; use chat.completions.create or completions.create"
        )

    def copy(self, **kwargs: Any) -> Any:
        """Not available: a copy would not share the record."""
        raise NotImplementedError("a managed session cannot be copied")
