"""An in-process inference server whose answers you write: text in, text out, with ids and log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atroposlib.envs.server_handling.server_harness import (
    DeterministicServer,
    create_chat_completion,
    create_completion,
    deterministic_logprob,
)

Reply = Callable[[str], str]
"""The prompt as text (chat template applied, or the conversation's lines) -> the answer."""


class ScriptedServer(DeterministicServer):
    """Answers with ``replies``: a function of the prompt, or texts given out in turn, over and over.

    Example:
        env = MyEnv(config, [], testing=True)
        server = script(env, ["<answer>3</answer>", "no idea"])
        ...
        assert "How many" in server.prompts[0]
    """

    def __init__(self, replies: Reply | Sequence[str], tokenizer: Any = None) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.prompts: list[str] = []
        self._replies = replies

    def _next(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if callable(self._replies):
            return self._replies(prompt)
        return self._replies[(len(self.prompts) - 1) % len(self._replies)]

    async def chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """``n`` answers to ``messages``."""
        async with self._slot(kwargs):
            conversation = self.conv_to_dictkey(kwargs["messages"] if "messages" in kwargs else args[0])
            return create_chat_completion([self._next(conversation) for _ in range(int(kwargs.get("n") or 1))])

    async def completion(self, *args: Any, **kwargs: Any) -> Any:
        """``n`` continuations of ``prompt``."""
        async with self._slot(kwargs):
            prompt = str(kwargs["prompt"] if "prompt" in kwargs else args[0])
            return create_completion([self._next(prompt) for _ in range(int(kwargs.get("n") or 1))])

    async def tokens_and_logprobs_completion(self, *args: Any, **kwargs: Any) -> Any:
        """``n`` continuations of ``prompt`` or ``input_ids`` as ids."""
        async with self._slot(kwargs):
            prompt, ids = kwargs.get("prompt", args[0] if args else None), kwargs.get("input_ids")
            prompt_ids = list(ids) if ids is not None else self._encode(str(prompt))
            text = str(prompt) if prompt is not None else str(self.tokenizer.decode(prompt_ids))
            limit = kwargs.get("max_tokens") or kwargs.get("max_completion_tokens") or kwargs.get("max_new_tokens")
            finished = [self._finish(self._encode(self._next(text)), limit) for _ in range(int(kwargs.get("n") or 1))]
            outputs = [tokens for tokens, _ in finished]
            logprobs = [[deterministic_logprob(token, i) for i, token in enumerate(tokens)] for tokens in outputs]
            return prompt_ids, outputs, logprobs, [reason for _, reason in finished]


def script(env: Any, replies: Reply | Sequence[str]) -> ScriptedServer:
    """Let ``env`` talk to a scripted server from now on; returns the server."""
    server = ScriptedServer(replies, env.tokenizer)
    env.server.servers = [server]
    return server
