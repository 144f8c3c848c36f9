"""``TrlVllmServer``: the vLLM server that ships with TRL, which takes prompt text and returns completion ids."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.api_server import APIServer, TokensAndLogprobs
from atroposlib.envs.server_handling.http_pool import status_error
from atroposlib.envs.server_handling.lazy_imports import LazyAttribute, LazyModule
from atroposlib.envs.server_handling.openai_routes import chat_completion_from, completion_from
from atroposlib.envs.server_handling.server_config import APIServerConfig, ReasoningConfig

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

# Stand-ins that import on first use; both names are part of this module's surface and may be replaced in tests.
AutoTokenizer: Any = LazyAttribute("transformers", "AutoTokenizer")
aiohttp: Any = LazyModule("aiohttp")

SAMPLING_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "max_tokens": 1024,
}


class TrlVllmServer(APIServer):
    """A server started with ``trl vllm-serve``.

    Example: ``TrlVllmServer(APIServerConfig(model_name="Qwen/Qwen3-4B", base_url="http://localhost:8000"))``
    """

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        super().__init__(config, reasoning_config)
        self.tokenizer = AutoTokenizer.from_pretrained(config.model_name)

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Nothing to watch: this server has no health route that says more than a request does."""
        self.server_healthy = True

    def is_watched(self) -> bool:
        """Never."""
        return False

    async def _generate(self, prompt: str, kwargs: dict[str, Any]) -> list[list[int]]:
        sampling = {name: kwargs.get(name, default) for name, default in SAMPLING_DEFAULTS.items()}
        if kwargs.get("max_completion_tokens"):
            sampling["max_tokens"] = kwargs["max_completion_tokens"]
        url = f"{(self.config.base_url or '').rstrip('/')}/generate/"
        timeout = aiohttp.ClientTimeout(total=self.config.timeout)
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={"prompts": [prompt], **sampling}, timeout=timeout) as response,
        ):
            status = getattr(response, "status", 200)
            if isinstance(status, int) and status >= 400:
                raise status_error(url, status, await response.read())
            reply = await response.json()
        return [list(ids) for ids in reply["completion_ids"]]

    def _finish_reason(self, ids: list[int]) -> str:
        return "stop" if self.tokenizer.eos_token_id in ids else "length"

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        prompt = self.tokenizer.apply_chat_template(kwargs["messages"], tokenize=False, add_generation_prompt=True)
        choices = [
            {
                "index": index,
                "finish_reason": self._finish_reason(ids),
                "message": {"role": "assistant", "content": self.tokenizer.decode(ids)},
            }
            for index, ids in enumerate(await self._generate(prompt, kwargs))
        ]
        return chat_completion_from({**self._header("chat.completion"), "choices": choices})

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        choices = [
            {"index": index, "finish_reason": self._finish_reason(ids), "text": self.tokenizer.decode(ids)}
            for index, ids in enumerate(await self._generate(kwargs["prompt"], kwargs))
        ]
        return completion_from({**self._header("text_completion"), "choices": choices})

    def _header(self, kind: str) -> dict[str, Any]:
        return {"id": str(uuid.uuid4()), "object": kind, "created": int(time.time()), "model": self.config.model_name}

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        raise NotImplementedError(
            "Token-level logprobs are not supported by TRL's vLLM server; for exact tokens use a plain vLLM server "
            "(server_type 'vllm', VLLMServer) or SGLang (server_type 'sglang', SGLangServer)"
        )
