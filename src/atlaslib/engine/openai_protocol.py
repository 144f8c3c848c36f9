"""The OpenAI wire form of the policy server, as pure functions: request bodies in, sampling parameters out; completions in, replies out.

Nothing here knows HTTP or the engine's loop. A field that is unknown or impossible raises :class:`RequestError`, which
names it; the server turns that into a 4xx reply in OpenAI's error form.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from atlaslib.engine.config import SamplingParams
from atlaslib.engine.sequence import Completion
from atlaslib.errors import AtroposError, unknown_name_message

LogprobsMode = Literal["temperature", "sampling", "raw"]
LOGPROBS_MODES: tuple[LogprobsMode, ...] = ("temperature", "sampling", "raw")
MAX_TOP_LOGPROBS = 20

# Request field -> SamplingParams field; the value is checked by SamplingParams itself.
SAMPLING_FIELDS: dict[str, str] = {
    "n": "n",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "prompt_logprobs": "prompt_logprobs",
    "min_tokens": "min_tokens",
    "skip_special_tokens": "skip_special_tokens",
    "include_stop_str_in_output": "include_stop_str_in_output",
}
# Fields of the official API that carry bookkeeping or only take their neutral value here.
NEUTRAL_FIELDS = frozenset(
    {
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
    }
)
SHARED_FIELDS = frozenset({"stop", "logit_bias", "stream", "stream_options", "logprobs_mode", "return_token_ids"})
CHAT_FIELDS = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "logprobs",
        "top_logprobs",
        "response_format",
        "chat_template_kwargs",
        "add_generation_prompt",
    }
)
COMPLETION_FIELDS = frozenset({"prompt", "logprobs", "echo", "suffix", "best_of"})
GENERATE_FIELDS = frozenset({"prompt", "logprobs"})
STREAM_OPTIONS = frozenset({"include_usage", "include_obfuscation"})


class RequestError(AtroposError, ValueError):
    """A request the policy server cannot serve, with the HTTP status, the field to blame and when a 429 may be over."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.status, self.param, self.retry_after_s = status, param, retry_after_s


@dataclass(kw_only=True, slots=True)
class ParsedRequest:
    """One request after checking: what to sample from and how to answer."""

    params: SamplingParams
    prompt_ids: list[list[int]] = field(default_factory=list)
    """One entry per prompt; each gives ``params.n`` choices."""
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    logprobs_mode: LogprobsMode = "temperature"
    return_token_ids: bool = False
    prompt_logprobs: bool = False
    echo: bool = False
    tools: list[dict[str, Any]] | None = None


def check_fields(body: Mapping[str, Any], *, extra: frozenset[str]) -> None:
    """Refuse fields nobody here understands, naming the nearest one that is understood."""
    known = SAMPLING_FIELDS.keys() | NEUTRAL_FIELDS | SHARED_FIELDS | extra
    for name, value in body.items():
        if name not in known and value is not None:
            raise RequestError(unknown_name_message("field", name, known), param=name)


def sampling_params(
    body: Mapping[str, Any], *, default_max_tokens: int | None, top_logprobs: int | None
) -> SamplingParams:
    """The engine's parameters out of a request body; None means "not given", as in the official API."""
    chosen: dict[str, Any] = {}
    for name, target in SAMPLING_FIELDS.items():
        if body.get(name) is not None:
            chosen[target] = body[name]
    if default_max_tokens is not None:
        chosen.setdefault("max_tokens", default_max_tokens)
    chosen.update(_stops(body.get("stop")))
    if body.get("logit_bias") is not None:
        chosen["logit_bias"] = body["logit_bias"]
    if top_logprobs:
        chosen["logprobs"] = top_logprobs
    try:
        return SamplingParams(**chosen)
    except AtroposError as error:
        raise RequestError(str(error), param=blamed_field(str(error))) from error


def blamed_field(message: str, default: str | None = None) -> str | None:
    """The request field an error of the engine begins with."""
    first = message.replace("=", " ").replace(":", " ").split(maxsplit=1)[0]
    return first if first in SAMPLING_FIELDS.keys() | SHARED_FIELDS | {"logprobs"} else default


def switch(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A field that is true or false; None means "not given"."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r:.80}; give true or false", param=name)
    return default if value is None else value


def shared_settings(body: Mapping[str, Any], default_mode: LogprobsMode) -> dict[str, Any]:
    """The settings chat and plain completion have in common, as keyword arguments of :class:`ParsedRequest`."""
    mode = body.get("logprobs_mode") or default_mode
    if mode not in LOGPROBS_MODES:
        raise RequestError(f"logprobs_mode is {mode!r}; use one of {', '.join(LOGPROBS_MODES)}", param="logprobs_mode")
    options = {} if body.get("stream_options") is None else body["stream_options"]
    if not isinstance(options, Mapping):
        raise RequestError(f"stream_options is {options!r:.80}; give an object", param="stream_options")
    for name in options:
        if name not in STREAM_OPTIONS:
            raise RequestError(unknown_name_message("stream option", name, STREAM_OPTIONS), param="stream_options")
    settings = {
        "stream": switch(body, "stream"),
        "include_usage": switch(options, "include_usage"),
        "logprobs_mode": mode,
        "return_token_ids": switch(body, "return_token_ids"),
        "prompt_logprobs": body.get("prompt_logprobs") is not None,
    }
    if settings["stream"] and settings["prompt_logprobs"]:
        raise RequestError("prompt_logprobs cannot be streamed; ask without stream", param="prompt_logprobs")
    return settings


def chat_top_logprobs(body: Mapping[str, Any]) -> int | None:
    """``top_logprobs`` of a chat request, checked."""
    top = body.get("top_logprobs")
    if top is None:
        return None
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_TOP_LOGPROBS:
        raise RequestError(
            f"top_logprobs is {top!r}; give a whole number from 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs"
        )
    if not switch(body, "logprobs"):
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    return top


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a chat request: a non-empty list of objects with a role."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a non-empty list", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] is {message!r:.80}; it needs a role and content", param="messages")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise RequestError(f"messages[{index}] has neither content nor tool_calls", param="messages")
        if not _is_text(content):
            raise RequestError(
                f"messages[{index}] has content that is not text; this server samples from text models",
                param="messages",
            )
    return messages


def _is_text(content: Any) -> bool:
    """Text, a list of text parts, or nothing."""
    if not isinstance(content, list):
        return content is None or isinstance(content, str)
    return all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )


def check_tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools a chat request offers; None when the model is not to see any."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RequestError(f"tools is {tools!r:.80}; give a list of objects", param="tools")
    if choice not in (None, "auto", "none"):
        raise RequestError(
            f"tool_choice is {choice!r:.80}; this server cannot force a call: use auto or none", param="tool_choice"
        )
    return tools if tools and choice != "none" else None


def token_ids_of(value: Any) -> list[int] | None:
    """``value`` as a list of token ids, or None when it is something else."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    ):
        return value
    return None


def chosen_logprobs(completion: Completion, mode: LogprobsMode) -> list[float]:
    """The log-prob of every sampled token, in the asked reading."""
    if mode == "sampling":
        return completion.logprobs
    return completion.temperature_logprobs if mode == "temperature" else completion.raw_logprobs


def distinct_versions(completions: Sequence[Completion]) -> list[int]:
    """The policy versions that made any token of these completions, ascending."""
    return sorted({version for completion in completions for version in completion.versions})


def usage(prompt_ids: Sequence[Sequence[int]], completions: Sequence[Completion]) -> dict[str, int]:
    """Token counts of one reply."""
    prompt, made = sum(map(len, prompt_ids)), sum(len(completion.token_ids) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def reply_head(
    kind: Literal["chat.completion", "chat.completion.chunk", "text_completion"], model: str
) -> dict[str, Any]:
    """The fields every OpenAI reply starts with."""
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def chat_logprobs(
    decoded: Sequence[str], values: Sequence[float], tops: Sequence[Sequence[tuple[str, float]]] | None
) -> dict[str, Any]:
    """The ``logprobs`` object of a chat choice."""
    content = []
    for position, (token, value) in enumerate(zip(decoded, values, strict=True)):
        alternatives = tops[position] if tops else ()
        content.append(
            {
                "token": token,
                "logprob": value,
                "bytes": _bytes_of(token),
                "top_logprobs": [
                    {"token": other, "logprob": lp, "bytes": _bytes_of(other)} for other, lp in alternatives
                ],
            }
        )
    return {"content": content, "refusal": None}


def _bytes_of(token: str) -> list[int] | None:
    """None for a part of a character: what it decodes to is not what it is."""
    return None if "\ufffd" in token else list(token.encode())


def completion_logprobs(
    decoded: Sequence[str],
    values: Sequence[float | None],
    tops: Sequence[Sequence[tuple[str, float]] | None] | None,
    *,
    position: int = 0,
) -> dict[str, Any]:
    """The ``logprobs`` object of a plain completion choice, its text beginning at `position` of the choice's."""
    offsets = []
    for token in decoded:
        offsets.append(position)
        position += len(token)
    return {
        "tokens": list(decoded),
        "token_logprobs": list(values),
        "top_logprobs": [None if top is None else _by_text(top) for top in tops] if tops else None,
        "text_offset": offsets,
    }


def _by_text(alternatives: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Of tokens that read the same (parts of characters) the likeliest stands for all; they come likeliest first."""
    found: dict[str, float] = {}
    for text, value in alternatives:
        found.setdefault(text, value)
    return found


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _stops(stop: Any) -> dict[str, Any]:
    if stop is None or stop == []:
        return {}
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or any(not isinstance(text, str) or not text for text in texts):
        raise RequestError(f"stop is {stop!r:.80}; give a string or a list of non-empty strings", param="stop")
    return {"stop": texts}
