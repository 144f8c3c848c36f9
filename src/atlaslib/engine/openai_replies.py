"""Replies of the policy server, whole and streamed, built from completions."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from typing import Any

from atlaslib.engine import openai_protocol as wire
from atlaslib.engine.openai_protocol import ParsedRequest
from atlaslib.engine.sequence import Completion
from atlaslib.engine.text import TextStream
from atroposlib.envs.server_handling.tool_formats import tool_format as find_tool_format


class ReplyWriter:
    """Knows the tokenizer and the model's name; everything else comes with the request. `versions`: the policy's, of the reply."""

    def __init__(self, tokenizer: Any, model_name: str, tool_format: str) -> None:
        self.tokenizer, self.model_name, self.tool_format = tokenizer, model_name, find_tool_format(tool_format)
        self._texts: dict[int, str] = {}  # of single tokens; decoding takes a hundred times as long as finding

    def chat(self, parsed: ParsedRequest, completions: list[Completion], versions: list[int]) -> dict[str, Any]:
        """A ``chat.completion`` object."""
        choices = []
        for index, completion in enumerate(completions):
            message, reason = self.message(parsed, completion)
            choice = {
                "index": index,
                "message": message,
                "finish_reason": reason,
                "logprobs": self.chat_logprobs(parsed, completion),
            }
            choices.append(choice | self._ids(parsed, completion))
        body = {"choices": choices} | self._prompt_tables(parsed, completions)
        return wire.reply_head("chat.completion", self.model_name) | body | self._tail(parsed, completions, versions)

    def completion(self, parsed: ParsedRequest, completions: list[Completion], versions: list[int]) -> dict[str, Any]:
        """A ``text_completion`` object."""
        choices = []
        for index, completion in enumerate(completions):
            prompt = parsed.prompt_ids[index // parsed.params.n]
            text = self.text(parsed, completion)
            if parsed.echo:
                text = self.prompt_text(parsed, prompt) + text
            choice = {"index": index, "text": text, "finish_reason": completion.finish_reason, "logprobs": None}
            if parsed.logprobs:
                choice["logprobs"] = self.completion_logprobs(parsed, prompt, completion)
            choices.append(choice | self._ids(parsed, completion))
        body = {"choices": choices} | self._prompt_tables(parsed, completions)
        return wire.reply_head("text_completion", self.model_name) | body | self._tail(parsed, completions, versions)

    def generate(self, parsed: ParsedRequest, completions: list[Completion], versions: list[int]) -> dict[str, Any]:
        """Token ids in, token ids out: the form the vLLM server class of an environment reads."""
        reply: dict[str, Any] = {
            "text": [self.text(parsed, completion) for completion in completions],
            "finish_reasons": [completion.finish_reason for completion in completions],
            "token_ids": [completion.token_ids for completion in completions],
            "prompt_token_ids": parsed.prompt_ids[0] if len(parsed.prompt_ids) == 1 else parsed.prompt_ids,
            "policy_versions": [completion.policy_versions or versions for completion in completions],
            "token_versions": [completion.versions for completion in completions],
        }
        if parsed.logprobs:
            reply["logprobs"] = [self._vllm_logprobs(parsed, completion) for completion in completions]
        return reply | self._prompt_tables(parsed, completions)

    def stream(self, parsed: ParsedRequest, *, chat: bool) -> StreamWriter:
        """A writer for one streamed reply."""
        return StreamWriter(self, parsed, chat=chat)

    def _prompt_tables(self, parsed: ParsedRequest, completions: list[Completion]) -> dict[str, Any]:
        """Log-probs of the prompt's tokens, or of every prompt's, where they were asked for."""
        if not parsed.prompt_logprobs:
            return {}
        firsts = completions[:: parsed.params.n]
        tables = [self._vllm_prompt_logprobs(*pair) for pair in zip(parsed.prompt_ids, firsts, strict=True)]
        return {"prompt_logprobs": tables[0] if len(tables) == 1 else tables}

    # -- parts ---------------------------------------------------------------------------------------------------

    def text(self, parsed: ParsedRequest, completion: Completion) -> str:
        if completion.text is not None:
            return completion.text
        decoded: str = self.tokenizer.decode(
            completion.token_ids, skip_special_tokens=parsed.params.skip_special_tokens
        )
        return decoded

    def prompt_text(self, parsed: ParsedRequest, prompt: list[int]) -> str:
        return str(self.tokenizer.decode(prompt, skip_special_tokens=parsed.params.skip_special_tokens))

    def message(self, parsed: ParsedRequest, completion: Completion) -> tuple[dict[str, Any], str | None]:
        """The assistant message and its finish reason; tool calls are taken out of the text when tools were offered."""
        text = self.text(parsed, completion)
        if parsed.tools:
            content, calls = self.tool_format.parse(text, parsed.tools)
            if calls:
                tool_calls = [
                    {
                        "id": f"call_{uuid.uuid4().hex[:24]}",
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments_json()},
                    }
                    for call in calls
                ]
                reason = "length" if completion.finish_reason == "length" else "tool_calls"
                return {"role": "assistant", "content": content or None, "tool_calls": tool_calls}, reason
        return {"role": "assistant", "content": text, "refusal": None}, completion.finish_reason

    def chat_logprobs(self, parsed: ParsedRequest, completion: Completion) -> dict[str, Any] | None:
        if not parsed.logprobs:
            return None
        values = wire.chosen_logprobs(completion, parsed.logprobs_mode)
        return wire.chat_logprobs(self._pieces(completion.token_ids), values, self._tops(completion.top_logprobs))

    def completion_logprobs(
        self, parsed: ParsedRequest, prompt: list[int], completion: Completion, position: int = 0
    ) -> dict[str, Any]:
        """Of a completion's tokens, and before them of the prompt's where `echo` asks and the completion carries them."""
        pieces, found = self._pieces(completion.token_ids), self._tops(completion.top_logprobs)
        tops: list[list[tuple[str, float]] | None] | None = None if found is None else [*found]
        values: list[float | None] = list(wire.chosen_logprobs(completion, parsed.logprobs_mode))
        if parsed.echo and completion.prompt_logprobs is not None:
            pieces = self._pieces(prompt) + pieces
            values = [None, *completion.prompt_logprobs[1:], *values]
            prompt_tops = self._tops(completion.prompt_top_logprobs)
            tops = None if prompt_tops is None else [None, *prompt_tops[1:], *(tops or [])]
        return wire.completion_logprobs(pieces, values, tops, position=position)

    def _vllm_logprobs(self, parsed: ParsedRequest, completion: Completion) -> list[list[dict[str, float]]]:
        values = wire.chosen_logprobs(completion, parsed.logprobs_mode)
        rows = []
        for position, (token, value) in enumerate(zip(completion.token_ids, values, strict=True)):
            others = _possible(completion.top_logprobs[position]) if completion.top_logprobs else {}
            rows.append([{str(token): value} | {str(other): lp for other, lp in others.items() if other != token}])
        return rows

    def _vllm_prompt_logprobs(self, prompt: list[int], completion: Completion) -> list[dict[str, float] | None]:
        values = completion.prompt_logprobs or [0.0] * len(prompt)
        tops = completion.prompt_top_logprobs or [{} for _ in prompt]
        rows: list[dict[str, float] | None] = [None]
        for token, value, others in list(zip(prompt, values, tops, strict=True))[1:]:
            rows.append({str(token): value} | {str(other): lp for other, lp in others.items() if other != token})
        return rows

    def _pieces(self, token_ids: list[int]) -> list[str]:
        return [self._piece(token) for token in token_ids]

    def _piece(self, token: int) -> str:
        found = self._texts.get(token)
        if found is None:
            found = self._texts[token] = self.tokenizer.decode([token])
        return found

    def _tops(self, tops: list[dict[int, float]] | None) -> list[list[tuple[str, float]]] | None:
        if tops is None:
            return None
        return [[(self._piece(token), value) for token, value in _possible(row).items()] for row in tops]

    def _ids(self, parsed: ParsedRequest, completion: Completion) -> dict[str, Any]:
        return {"token_ids": completion.token_ids} if parsed.return_token_ids else {}

    def _tail(self, parsed: ParsedRequest, completions: list[Completion], versions: list[int]) -> dict[str, Any]:
        tail: dict[str, Any] = {
            "usage": wire.usage(parsed.prompt_ids, completions),
            "policy_versions": versions,
        }
        if parsed.return_token_ids:
            tail["prompt_token_ids"] = parsed.prompt_ids[0] if len(parsed.prompt_ids) == 1 else parsed.prompt_ids
        return tail


def _possible(row: dict[int, float]) -> dict[int, float]:
    """Without the tokens that could not be sampled (top-k, top-p, min-p): JSON has no number for their log-prob."""
    return {token: value for token, value in row.items() if value > -math.inf}


class StreamWriter:
    """Chunks of one streamed reply: text as it becomes certain, tool calls once they are whole, then the finish reasons."""

    def __init__(self, writer: ReplyWriter, parsed: ParsedRequest, *, chat: bool) -> None:
        self.writer, self.parsed, self.chat = writer, parsed, chat
        self.head = wire.reply_head("chat.completion.chunk" if chat else "text_completion", writer.model_name)
        count = parsed.params.n * len(parsed.prompt_ids)
        self.streams = [  # for an engine that has no tokenizer and sends no text
            TextStream(writer.tokenizer, stops=[], skip_special=parsed.params.skip_special_tokens) for _ in range(count)
        ]
        self.begun = [False] * count
        self.positions = [0] * count  # where the next token's text begins in the text of a plain completion

    def start(self) -> Iterator[dict[str, Any]]:
        """Chat replies open with the role of each choice."""
        if self.chat:
            for index in range(len(self.streams)):
                yield self._chunk(index, {"role": "assistant", "content": ""})

    def part(self, index: int, part: Completion) -> Iterator[dict[str, Any]]:
        """The chunk for newly sampled tokens; with tools offered, text waits until it is known not to be a call."""
        delta, first = self._text(index, part), not self.begun[index]
        self.begun[index] = True
        if self.chat:
            held = self.parsed.tools is not None
            logprobs = self.writer.chat_logprobs(self.parsed, part) if part.token_ids else None
            if (delta and not held) or logprobs or (self.parsed.return_token_ids and part.token_ids):
                yield self._chunk(index, {} if held else {"content": delta}, logprobs=logprobs, part=part)
            return
        prompt = self.parsed.prompt_ids[index // self.parsed.params.n]
        if first and self.parsed.echo:
            delta = self.writer.prompt_text(self.parsed, prompt) + delta
        logprobs = self._completion_logprobs(index, prompt, part)
        if delta or logprobs or (self.parsed.return_token_ids and part.token_ids):
            yield self._chunk(index, delta, logprobs=logprobs, part=part)

    def _text(self, index: int, part: Completion) -> str:
        if part.text is not None:
            return part.text
        self.streams[index].push(part.token_ids)
        return self.streams[index].take(final=part.finish_reason is not None)

    def _completion_logprobs(self, index: int, prompt: list[int], part: Completion) -> dict[str, Any] | None:
        if not self.parsed.logprobs or not (part.token_ids or part.prompt_logprobs):
            return None
        found = self.writer.completion_logprobs(self.parsed, prompt, part, self.positions[index])
        self.positions[index] += sum(map(len, found["tokens"]))
        return found

    def end(self, completions: list[Completion], policy_versions: list[int]) -> Iterator[dict[str, Any]]:
        """What is left of every choice, its finish reason, and the usage when asked for."""
        versions = {"policy_versions": policy_versions}
        for index, completion in enumerate(completions):
            yield from self._end_of(index, completion, versions)
        if self.parsed.include_usage:
            yield self.head | {"choices": [], "usage": wire.usage(self.parsed.prompt_ids, completions)} | versions

    def _end_of(self, index: int, completion: Completion, versions: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not self.chat:
            yield self._chunk(index, "", reason=completion.finish_reason) | versions
            return
        message, reason = self.writer.message(self.parsed, completion)
        delta: dict[str, Any] = {}
        if self.parsed.tools and message["content"]:
            delta["content"] = message["content"]
        if message.get("tool_calls"):
            delta["tool_calls"] = [{"index": number} | call for number, call in enumerate(message["tool_calls"])]
        if delta:
            yield self._chunk(index, delta)
        yield self._chunk(index, {}, reason=reason) | versions

    def _chunk(
        self,
        index: int,
        delta: Any,
        *,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        part: Completion | None = None,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"delta": delta} if self.chat else {"text": delta}
        choice = {"index": index} | body | {"finish_reason": reason, "logprobs": logprobs}
        if part is not None and self.parsed.return_token_ids:
            choice["token_ids"] = part.token_ids
        return self.head | {"choices": [choice]}
