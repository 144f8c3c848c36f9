"""Servers that live in this process: canned replies for tests, and a deterministic server for runs without a network."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.adaptive_semaphore import AsyncSemWithAdaptiveWeight
from atroposlib.envs.server_handling.api_server import TokensAndLogprobs
from atroposlib.envs.server_handling.policy_versions import note_reply_versions
from atroposlib.envs.server_handling.server_config import APIServerConfig

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion


def create_chat_completion(resp: str | list[str], n: int = 1, finish_reason: str = "stop") -> ChatCompletion:
    """A ``ChatCompletion`` with ``n`` choices of the same text, or one choice per text of a list."""
    from atroposlib.envs.server_handling.openai_routes import chat_completion_from

    texts = [resp] * n if isinstance(resp, str) else list(resp)
    choices = [
        {"index": i, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text}}
        for i, text in enumerate(texts)
    ]
    return chat_completion_from(
        {"id": "test_id", "created": 0, "model": "test_model", "object": "chat.completion", "choices": choices}
    )


def create_completion(resp: str | list[str], n: int = 1, finish_reason: str = "stop") -> Completion:
    """A ``Completion`` with ``n`` choices of the same text, or one choice per text of a list."""
    from atroposlib.envs.server_handling.openai_routes import completion_from

    texts = [resp] * n if isinstance(resp, str) else list(resp)
    choices = [{"index": i, "finish_reason": finish_reason, "text": text} for i, text in enumerate(texts)]
    return completion_from(
        {"id": "test_id", "created": 0, "model": "test_model", "object": "text_completion", "choices": choices}
    )


class ServerHarness:
    """Replies that were set beforehand, found by conversation or prompt; anything else is answered with None.

    Example::

        harness = ServerHarness()
        harness.set_desired_response([{"role": "user", "content": "hi"}], create_chat_completion("hello"))
    """

    tokenizer: Any = None

    def __init__(self) -> None:
        self.response_map: dict[str, Any] = {}
        self.tokens_and_logprobs_map: dict[str, TokensAndLogprobs] = {}
        self.config = APIServerConfig(model_name="test_model", health_check=False)
        self.sem = AsyncSemWithAdaptiveWeight(1000)
        self.eval_sem = AsyncSemWithAdaptiveWeight(1000)
        self.server_healthy = True
        self.num_open_sessions = 0

    @staticmethod
    def conv_to_dictkey(input_message: list[dict[str, Any]]) -> str:
        """The key of a conversation: one line per role and content."""
        return "\n".join(f"role:{message['role']}\ncontent:{message.get('content')}" for message in input_message)

    def set_desired_response(self, input_message: list[dict[str, Any]], desired_response: ChatCompletion) -> None:
        """Answer this conversation with this reply."""
        self.response_map[self.conv_to_dictkey(input_message)] = desired_response

    def set_desired_completion(self, input_message: str, completion: Completion) -> None:
        """Answer this prompt with this reply."""
        self.response_map[input_message] = completion

    def set_tokens_and_logprobs_response(
        self,
        prompt: str,
        prompt_tokens: list[int],
        output_tokens_list: list[list[int]],
        output_logprobs_list: list[list[float]],
        finish_reasons: list[Any],
    ) -> None:
        """Answer a token call for this prompt with these ids."""
        self.tokens_and_logprobs_map[prompt] = (prompt_tokens, output_tokens_list, output_logprobs_list, finish_reasons)

    async def chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """The reply set for ``messages``, or None."""
        messages = kwargs["messages"] if "messages" in kwargs else args[0]
        return self.response_map.get(self.conv_to_dictkey(messages))

    async def completion(self, *args: Any, **kwargs: Any) -> Any:
        """The reply set for ``prompt``, or None."""
        return self.response_map.get(kwargs["prompt"] if "prompt" in kwargs else args[0])

    async def tokens_and_logprobs_completion(self, *args: Any, **kwargs: Any) -> Any:
        """The ids set for ``prompt``, or None."""
        return self.tokens_and_logprobs_map.get(kwargs["prompt"] if "prompt" in kwargs else args[0])

    async def update_weight(self, weight: float) -> None:
        """Use this share of the limits."""
        self.sem.update_weight(weight)
        self.eval_sem.update_weight(weight)

    async def wandb_metrics(self, metrics_dict: dict[str, Any] | None, server_name: str | None) -> dict[str, Any]:
        """No timings are kept in process."""
        return metrics_dict if metrics_dict is not None else {}

    async def aclose(self) -> None:
        """Nothing to close."""


class DeterministicServer(ServerHarness):
    """What ``testing=True`` runs on: every prompt has an answer, the same on every run, with ids and log-probs.

    Replies set beforehand win. Choice ``i`` of a prompt always has the same text; different choices differ.
    """

    POLICY_VERSION = 0

    def __init__(self, config: APIServerConfig | None = None) -> None:
        super().__init__()
        if config is not None:
            self.config = config
            self.sem = AsyncSemWithAdaptiveWeight(config.num_max_requests_at_once)
            self.eval_sem = AsyncSemWithAdaptiveWeight(config.num_requests_for_eval)

    async def chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """The reply set for ``messages``, or a deterministic one with ``n`` choices."""
        async with self._slot(kwargs):
            canned = await super().chat_completion(*args, **kwargs)
            if canned is not None:
                return canned
            messages = kwargs["messages"] if "messages" in kwargs else args[0]
            self._note_versions(kwargs)
            return create_chat_completion(self._texts(self.conv_to_dictkey(messages), kwargs))

    async def completion(self, *args: Any, **kwargs: Any) -> Any:
        """The reply set for ``prompt``, or a deterministic one with ``n`` choices."""
        async with self._slot(kwargs):
            canned = await super().completion(*args, **kwargs)
            if canned is not None:
                return canned
            self._note_versions(kwargs)
            prompt = kwargs["prompt"] if "prompt" in kwargs else args[0]
            return create_completion(self._texts(str(prompt), kwargs))

    async def tokens_and_logprobs_completion(self, *args: Any, **kwargs: Any) -> Any:
        """The ids set for ``prompt``, or deterministic ones."""
        async with self._slot(kwargs):
            prompt, ids = kwargs.get("prompt", args[0] if args else None), kwargs.get("input_ids")
            if prompt in self.tokens_and_logprobs_map:
                return self.tokens_and_logprobs_map[prompt]
            prompt_ids = list(ids) if ids is not None else self._encode(str(prompt))
            self._note_versions(kwargs)
            outputs, reasons = [], []
            limit = kwargs.get("max_tokens") or kwargs.get("max_completion_tokens") or kwargs.get("max_new_tokens")
            for text in self._texts(str(prompt_ids), kwargs):
                tokens, reason = self._finish(self._encode(text), limit)
                outputs.append(tokens)
                reasons.append(reason)
            logprobs = [[deterministic_logprob(token, i) for i, token in enumerate(tokens)] for tokens in outputs]
            return prompt_ids, outputs, logprobs, reasons

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Deterministic log-probs of a given prompt."""
        async with self._slot(kwargs):
            ids = kwargs.get("input_ids")
            ids = list(ids) if ids is not None else self._encode(kwargs["prompt"])
            top = max(1, int(kwargs.get("top_k") or kwargs.get("top_logprobs") or 1))
            return {
                "prompt_tokens": ids,
                "prompt_topk_token_ids": [[token + k for k in range(top)] for token in ids],
                "prompt_topk_logprobs": [[deterministic_logprob(token, k) - k for k in range(top)] for token in ids],
            }

    def _note_versions(self, kwargs: dict[str, Any]) -> None:
        note_reply_versions({"policy_versions": [self.POLICY_VERSION]}, int(kwargs.get("n") or 1))

    def _slot(self, kwargs: dict[str, Any]) -> AsyncSemWithAdaptiveWeight:
        return self.sem if kwargs.get("split", "train") == "train" else self.eval_sem

    @staticmethod
    def _texts(key: str, kwargs: dict[str, Any]) -> list[str]:
        return [deterministic_text(key, choice) for choice in range(int(kwargs.get("n") or 1))]

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is not None:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        return list(text.encode())

    def _finish(self, tokens: list[int], limit: int | None) -> tuple[list[int], str]:
        end = getattr(self.tokenizer, "eos_token_id", None)
        whole = [*tokens, end] if end is not None else tokens
        if limit is not None and 0 < limit < len(whole):
            return whole[:limit], "length"
        return whole, "stop"


def deterministic_text(key: str, choice: int) -> str:
    """A short answer that depends on the prompt and the choice only."""
    digest = hashlib.sha256(f"{key}\x00{choice}".encode()).digest()
    return f"Reply {digest[:3].hex()}: the answer is \\boxed{{{int.from_bytes(digest[3:5], 'big') % 100}}}."


def deterministic_logprob(token: int, position: int) -> float:
    """A log-prob between -2 and 0 that depends on the token and its position only."""
    return -((token * 7 + position * 13) % 200 + 1) / 100.0
