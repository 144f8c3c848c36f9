"""``SGLangServer``: OpenAI routes for text, SGLang's own ``/generate`` for exact tokens."""

from __future__ import annotations

from typing import Any

from atroposlib.envs.server_handling.api_server import TokensAndLogprobs
from atroposlib.envs.server_handling.openai_routes import split_request
from atroposlib.envs.server_handling.openai_server import APIServerConfig, resolve_openai_configs
from atroposlib.envs.server_handling.policy_versions import note_reply_versions
from atroposlib.envs.server_handling.vllm_server import TokenizerOwner

__all__ = ["APIServerConfig", "SGLangServer", "resolve_openai_configs"]

REQUEST_FIELDS = frozenset({"lora_path", "session_params", "custom_logit_processor", "return_hidden_states", "rid"})


class SGLangServer(TokenizerOwner):
    """An SGLang server.

    Example: ``SGLangServer(APIServerConfig(model_name="Qwen/Qwen3-4B", base_url="http://localhost:30000/v1"))``
    """

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        fields, headers, timeout_s = split_request(kwargs)
        prompt_ids = self.prompt_ids(fields)
        fields.pop("model", None)
        for name in ("max_tokens", "max_completion_tokens"):
            if name in fields:
                fields["max_new_tokens"] = fields.pop(name)
        extra = {name: fields.pop(name) for name in REQUEST_FIELDS & fields.keys()}
        reply = await self.http.post_json(
            f"{self.root_url()}/generate",
            {
                "input_ids": prompt_ids,
                "sampling_params": fields,
                "return_logprob": True,
                "return_text_in_logprobs": False,
                **extra,
            },
            headers={**self.request_headers(), **headers},
            timeout_s=timeout_s or self.config.timeout,
        )
        replies = reply if isinstance(reply, list) else [reply]
        tokens, logprobs, reasons = [], [], []
        for one in replies:
            sampled = one["meta_info"]["output_token_logprobs"]
            tokens.append([int(entry[1]) for entry in sampled])
            logprobs.append([float(entry[0]) for entry in sampled])
            reasons.append(one["meta_info"].get("finish_reason"))
            note_reply_versions(one, 1)
        return prompt_ids, tokens, logprobs, reasons

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        fields, headers, timeout_s = split_request(kwargs)
        prompt_ids = self.prompt_ids(fields)
        top = max(1, int(fields.get("top_k") or fields.get("top_logprobs") or 1))
        reply = await self.http.post_json(
            f"{self.root_url()}/generate",
            {
                "input_ids": prompt_ids,
                "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "n": 1},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": top,
                "return_text_in_logprobs": False,
            },
            headers={**self.request_headers(), **headers},
            timeout_s=timeout_s or self.config.timeout,
        )
        one = reply[0] if isinstance(reply, list) else reply
        positions = one["meta_info"].get("input_top_logprobs")
        if positions is None:
            raise ValueError(f"{self.label} sent no 'input_top_logprobs'; it cannot score given text")
        return {
            "prompt_tokens": prompt_ids,
            "prompt_topk_token_ids": [[int(entry[1]) for entry in position or []] for position in positions],
            "prompt_topk_logprobs": [[float(entry[0]) for entry in position or []] for position in positions],
        }
