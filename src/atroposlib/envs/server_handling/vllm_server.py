"""``VLLMServer``: OpenAI routes for text; exact tokens from ``/generate`` (this project's policy server, vLLM's API server) or, where that
route is missing (``vllm serve``), from ``/v1/completions`` with token ids in and out.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from atroposlib.envs.server_handling.api_server import TokensAndLogprobs
from atroposlib.envs.server_handling.openai_routes import HEALTH_TIMEOUT_S, OpenAIRoutes, split_request
from atroposlib.envs.server_handling.openai_server import APIServerConfig, resolve_openai_configs
from atroposlib.envs.server_handling.policy_versions import note_reply_versions
from atroposlib.envs.server_handling.server_config import ReasoningConfig
from atroposlib.errors import InferenceServerError
from atroposlib.utils.gathering import gather_or_cancel

__all__ = ["APIServerConfig", "TokenizerOwner", "VLLMServer", "resolve_openai_configs"]

logger = logging.getLogger(__name__)


class TokenizerOwner(OpenAIRoutes):
    """A server whose prompts are token ids; its tokenizer is loaded when it is first needed."""

    _tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer named by ``tokenizer_name``, or by ``model_name`` when that is 'none'."""
        if self._tokenizer is None:
            from atroposlib.utils.tokenizers.loading import load_tokenizer

            name = self.config.tokenizer_name
            self._tokenizer = load_tokenizer(self.config.model_name if name in ("", "none") else name)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        """Exact ids of ``n`` continuations, also from servers that ignore ``n``."""
        n = kwargs.get("n") or 1
        if n == 1 or not self.config.n_kwarg_is_ignored:
            return await super().tokens_and_logprobs_completion(**kwargs)
        single = {key: value for key, value in kwargs.items() if key != "n"}
        calls = (super(TokenizerOwner, self).tokens_and_logprobs_completion(**single) for _ in range(n))
        replies = await gather_or_cancel(*calls)
        outputs = [ids for reply in replies for ids in reply[1]]
        logprobs = [values for reply in replies for values in reply[2]]
        return replies[0][0], outputs, logprobs, [reason for reply in replies for reason in reply[3]]

    def prompt_ids(self, fields: dict[str, Any]) -> list[int]:
        """Remove the prompt from ``fields`` and return its ids: ``input_ids`` as given, else ``prompt`` encoded."""
        prompt, input_ids = fields.pop("prompt", None), fields.pop("input_ids", None)
        if input_ids is None and prompt is None:
            raise ValueError("a token call needs 'input_ids' or 'prompt'")
        ids = list(input_ids) if input_ids is not None else list(self.tokenizer.encode(prompt))
        return self._without_doubled_bos(ids)

    def _without_doubled_bos(self, ids: list[int]) -> list[int]:
        # Only a doubled first id can be a doubled BOS, so the tokenizer is not loaded for anything else.
        if len(ids) >= 2 and ids[0] == ids[1] and ids[0] == getattr(self.tokenizer, "bos_token_id", None):
            return ids[1:]
        return ids


class VLLMServer(TokenizerOwner):
    """A vLLM server, or this project's policy server.

    Example: ``VLLMServer(APIServerConfig(model_name="Qwen/Qwen3-4B", base_url="http://localhost:9001/v1"))``
    """

    _has_generate = _has_weight_info = True  # until it answers that it has not

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        super().__init__(config, reasoning_config)

    async def probe(self) -> bool:
        """Whether ``/health`` answers."""
        url = f"{self.root_url()}/health"
        status = await self.http.get_status(url, headers=self.request_headers(), timeout_s=HEALTH_TIMEOUT_S)
        return 0 < status < 500

    async def _generate(self, kwargs: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        fields, headers, timeout_s = split_request(kwargs)
        prompt_ids = self.prompt_ids(fields)
        model = fields.pop("model", self.config.model_name)
        for name in ("max_new_tokens", "max_completion_tokens"):
            if name in fields:
                fields["max_tokens"] = fields.pop(name)
        rest: dict[str, Any] = {
            "headers": {**self.request_headers(), **headers},
            "timeout_s": timeout_s or self.config.timeout,
        }
        if self._has_generate:
            url = f"{self.root_url()}/generate"
            try:
                body = {"prompt": {"prompt_token_ids": prompt_ids}, "logprobs": 0, **fields}
                return prompt_ids, _object(await self.http.post_json(url, body, **rest), url)
            except InferenceServerError as error:
                if error.status != 404:
                    raise
            logger.info("%s has no /generate; exact tokens come from /v1/completions", self.label)
            self._has_generate = False
        url = f"{self.root_url()}/v1/completions"
        body = {"model": model, "prompt": prompt_ids, "logprobs": 0, "return_token_ids": True, **fields}
        before = await self._weights_version(rest)
        reply = from_completions(_object(await self.http.post_json(url, body, **rest), url), url)
        after = await self._weights_version(rest)
        if before is not None and after is not None:
            reply["policy_versions"] = list(range(min(before, after), max(before, after) + 1))
        return prompt_ids, reply

    async def _weights_version(self, rest: dict[str, Any]) -> int | None:
        """The policy version whose weights the server carries; a trainer that pushes them names them ``.../v3``."""
        if not self._has_weight_info:
            return None
        try:
            found = await self.http.request_json("GET", f"{self.root_url()}/weight_info", **rest)
        except InferenceServerError as error:
            if error.status is None:
                raise
            self._has_weight_info = False  # an older vLLM, or one without its development routes
            return None
        named = re.search(r"/v(\d+)$", str(found.get("weight_version"))) if isinstance(found, dict) else None
        return int(named[1]) if named else None

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        prompt_ids, reply = await self._generate(kwargs)
        if "logprobs" not in reply:
            url = f"{self.root_url()}/generate"
            raise InferenceServerError(
                f"{url} sent no 'logprobs' (fields: {sorted(reply)}); token-exact calls need a server that returns them",
                url=url,
            )
        tokens, logprobs = sampled_tokens(reply)
        note_reply_versions(reply, len(tokens))
        finish_reasons = list(reply.get("finish_reasons") or [None] * len(tokens))
        return echoed_prompt(reply, prompt_ids), tokens, logprobs, finish_reasons

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        top_k = kwargs.pop("top_k", None)
        top_logprobs = kwargs.pop("top_logprobs", None)
        num_top = max(1, int(top_k if top_k is not None else (top_logprobs or 1)))
        request = {"max_tokens": 1, **kwargs, "prompt_logprobs": num_top, "n": 1, "temperature": 0.0, "top_p": 1.0}
        prompt_ids, reply = await self._generate(request)
        if reply.get("prompt_logprobs") is None:
            raise ValueError(
                f"{self.label} sent no 'prompt_logprobs'; it cannot score given text (start it with a server that does)"
            )
        ids, logprobs = prompt_top_logprobs(reply["prompt_logprobs"])
        return {"prompt_tokens": prompt_ids, "prompt_topk_token_ids": ids, "prompt_topk_logprobs": logprobs}


def _object(reply: Any, url: str) -> dict[str, Any]:
    if not isinstance(reply, dict):
        raise InferenceServerError(f"{url} answered {type(reply).__name__}, not an object", url=url)
    return reply


def from_completions(reply: dict[str, Any], url: str) -> dict[str, Any]:
    """A reply of ``/v1/completions`` in the form of ``/generate``; ids and log-probs must be there and as many."""
    choices = list(reply.get("choices") or [])
    made: dict[str, Any] = {"token_ids": [], "logprobs": [], "finish_reasons": []}
    for choice in choices:
        ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if ids is None or logprobs is None or len(ids) != len(logprobs):
            raise InferenceServerError(
                f"{url} must return token_ids and as many logprobs (vLLM 0.10.2 or newer); got {sorted(choice)}",
                url=url,
            )
        made["token_ids"].append(ids)
        made["logprobs"].append([float(value) for value in logprobs])
        made["finish_reasons"].append(choice.get("finish_reason"))
    first = choices[0] if choices else {}
    known = {name: first[name] for name in ("prompt_token_ids", "prompt_logprobs") if first.get(name) is not None}
    return made | known


def echoed_prompt(reply: dict[str, Any], sent: list[int]) -> list[int]:
    """The prompt ids the server says it used, or the ones sent."""
    echoed = reply.get("prompt_token_ids")
    if isinstance(echoed, list) and echoed and isinstance(echoed[0], int):
        return echoed
    return sent


def sampled_tokens(reply: dict[str, Any]) -> tuple[list[list[int]], list[list[float]]]:
    """Per sequence: sampled ids and their log-probs.

    ``logprobs[sequence][position]`` is a number (then ``token_ids`` names the ids), ``{id: logprob}``, or a list with that.
    """
    known = reply.get("token_ids")
    all_tokens: list[list[int]] = []
    all_logprobs: list[list[float]] = []
    for index, positions in enumerate(reply["logprobs"]):
        tokens, logprobs = _one_sequence(positions or [], known[index] if known else None)
        all_tokens.append(tokens)
        all_logprobs.append(logprobs)
    return all_tokens, all_logprobs


def _one_sequence(positions: list[Any], known: list[int] | None) -> tuple[list[int], list[float]]:
    if known is not None and all(isinstance(entry, float) for entry in positions):
        return list(known), positions
    pairs = [_chosen(entry, known[i] if known is not None else None) for i, entry in enumerate(positions)]
    tokens = list(known) if known is not None else [token for token, _ in pairs]
    return tokens, [logprob for _, logprob in pairs]


def _chosen(entry: Any, token: int | None) -> tuple[int, float]:
    if type(entry) is list and entry:
        entry = entry[0]
    if type(entry) is dict and entry:
        key = next(iter(entry)) if len(entry) == 1 or str(token) not in entry else str(token)
        value = entry[key]
        return int(key), value if type(value) is float else _number(value)
    if isinstance(entry, int | float) and token is not None:
        return token, float(entry)
    raise ValueError(f"a log-prob entry of /generate is neither a number nor a mapping of id to log-prob: {entry!r}")


def _number(value: Any) -> float:
    return float(value["logprob"] if isinstance(value, dict) else value)


def prompt_top_logprobs(raw: list[Any]) -> tuple[list[list[int]], list[list[float]]]:
    """Top ids and log-probs per prompt position, from ``[position]`` or ``[sequence][position]``; null gives empty lists."""
    positions = _positions(raw)
    ids: list[list[int]] = []
    logprobs: list[list[float]] = []
    for entry in positions:
        merged: dict[str, Any] = {}
        for part in entry if isinstance(entry, list) else [entry or {}]:
            merged.update(part or {})
        ids.append([int(token) for token in merged])
        logprobs.append([_number(value) for value in merged.values()])
    return ids, logprobs


def _positions(raw: list[Any]) -> list[Any]:
    if len(raw) == 1 and isinstance(raw[0], list) and not _is_list_of_one_mapping(raw[0]):
        return raw[0]
    return raw


def _is_list_of_one_mapping(entry: list[Any]) -> bool:
    return len(entry) == 1 and isinstance(entry[0], dict)
