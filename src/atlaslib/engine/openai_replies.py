"""Replies of the policy server, whole and streamed, built from completions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from atlaslib.engine import openai_protocol as wire
from atlaslib.engine.openai_protocol import ParsedRequest
from atlaslib.engine.sequence import Completion
from atlaslib.engine.text import TextStream
from atroposlib.envs.server_handling.tool_formats import tool_format as find_tool_format


class ReplyWriter:
    """Knows the tokenizer and the model's name; everything else comes with the request."""

    def __init__(self, tokenizer: Any, model_name: str, tool_format: str) -> None:
        self.tokenizer, self.model_name, self.tool_format = tokenizer, model_name, find_tool_format(tool_format)

    def chat(self, parsed: ParsedRequest, completions: list[Completion]) -> dict[str, Any]:
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
        return (
            wire.reply_head("chat.completion", self.model_name) | {"choices": choices} | self._tail(parsed, completions)
        )

    def completion(self, parsed: ParsedRequest, completions: list[Completion]) -> dict[str, Any]:
        """A ``text_completion`` object."""
        choices = []
        for index, completion in enumerate(completions):
            prompt = parsed.prompt_ids[index // parsed.params.n]
            text = self.text(parsed, completion)
            if parsed.echo:
                text = self.tokenizer.decode(prompt, skip_special_tokens=parsed.params.skip_special_tokens) + text
            choice = {"index": index, "text": text, "finish_reason": completion.finish_reason, "logprobs": None}
            if parsed.logprobs:
                choice["logprobs"] = self._completion_logprobs(parsed, prompt, completion)
            choices.append(choice | self._ids(parsed, completion))
        return (
            wire.reply_head("text_completion", self.model_name) | {"choices": choices} | self._tail(parsed, completions)
        )

    def generate(self, parsed: ParsedRequest, completions: list[Completion]) -> dict[str, Any]:
        """Token ids in, token ids out: the form the vLLM server class of an environment reads."""
        reply: dict[str, Any] = {
            "text": [self.text(parsed, completion) for completion in completions],
            "finish_reasons": [completion.finish_reason for completion in completions],
            "token_ids": [completion.token_ids for completion in completions],
            "prompt_token_ids": parsed.prompt_ids[0] if len(parsed.prompt_ids) == 1 else parsed.prompt_ids,
            "policy_versions": [completion.policy_versions for completion in completions],
            "token_versions": [completion.versions for completion in completions],
        }
        if parsed.logprobs:
            reply["logprobs"] = [self._vllm_logprobs(parsed, completion) for completion in completions]
        if parsed.params.prompt_logprobs is not None:
            tables = [
                self._vllm_prompt_logprobs(ids, completions[i * parsed.params.n])
                for i, ids in enumerate(parsed.prompt_ids)
            ]
            reply["prompt_logprobs"] = tables[0] if len(tables) == 1 else tables
        return reply

    def stream(self, parsed: ParsedRequest, *, chat: bool) -> StreamWriter:
        """A writer for one streamed reply."""
        return StreamWriter(self, parsed, chat=chat)

    # -- parts ---------------------------------------------------------------------------------------------------

    def text(self, parsed: ParsedRequest, completion: Completion) -> str:
        if completion.text is not None:
            return completion.text
        decoded: str = self.tokenizer.decode(
            completion.token_ids, skip_special_tokens=parsed.params.skip_special_tokens
        )
        return decoded

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
        return wire.chat_logprobs(self._pieces(completion.token_ids), values, self._tops(completion))

    def _completion_logprobs(self, parsed: ParsedRequest, prompt: list[int], completion: Completion) -> dict[str, Any]:
        pieces, tops = self._pieces(completion.token_ids), self._tops(completion)
        values: list[float | None] = list(wire.chosen_logprobs(completion, parsed.logprobs_mode))
        if parsed.echo and completion.prompt_logprobs is not None:
            pieces = self._pieces(prompt) + pieces
            values = [None, *completion.prompt_logprobs[1:], *values]
            tops = None
        return wire.completion_logprobs(pieces, values, tops)

    def _vllm_logprobs(self, parsed: ParsedRequest, completion: Completion) -> list[list[dict[str, float]]]:
        values = wire.chosen_logprobs(completion, parsed.logprobs_mode)
        rows = []
        for position, (token, value) in enumerate(zip(completion.token_ids, values, strict=True)):
            others = completion.top_logprobs[position] if completion.top_logprobs else {}
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
        return [self.tokenizer.decode([token]) for token in token_ids]

    def _tops(self, completion: Completion) -> list[list[tuple[str, float]]] | None:
        if completion.top_logprobs is None:
            return None
        return [
            [(self.tokenizer.decode([token]), value) for token, value in row.items()] for row in completion.top_logprobs
        ]

    def _ids(self, parsed: ParsedRequest, completion: Completion) -> dict[str, Any]:
        return {"token_ids": completion.token_ids} if parsed.return_token_ids else {}

    def _tail(self, parsed: ParsedRequest, completions: list[Completion]) -> dict[str, Any]:
        tail: dict[str, Any] = {
            "usage": wire.usage(parsed.prompt_ids, completions),
            "policy_versions": wire.distinct_versions(completions),
        }
        if parsed.return_token_ids:
            tail["prompt_token_ids"] = parsed.prompt_ids[0] if len(parsed.prompt_ids) == 1 else parsed.prompt_ids
        return tail


class StreamWriter:
    """Chunks of one streamed reply: text as it becomes certain, tool calls once they are whole, then the finish reasons."""

    def __init__(self, writer: ReplyWriter, parsed: ParsedRequest, *, chat: bool) -> None:
        self.writer, self.parsed, self.chat = writer, parsed, chat
        self.head = wire.reply_head("chat.completion.chunk" if chat else "text_completion", writer.model_name)
        count = parsed.params.n * len(parsed.prompt_ids)
        self.streams = [
            TextStream(writer.tokenizer, stops=parsed.params.stop, skip_special=parsed.params.skip_special_tokens)
            for _ in range(count)
        ]

    def start(self) -> Iterator[dict[str, Any]]:
        """Chat replies open with the role of each choice."""
        if self.chat:
            for index in range(len(self.streams)):
                yield self._chunk(index, {"role": "assistant", "content": ""})

    def part(self, index: int, part: Completion) -> Iterator[dict[str, Any]]:
        """The chunk for newly sampled tokens; with tools offered, text waits until it is known not to be a call."""
        self.streams[index].push(part.token_ids)
        delta = self.streams[index].take(final=False)
        logprobs = self.writer.chat_logprobs(self.parsed, part) if self.chat else None
        if self.parsed.tools and self.chat:
            return
        if delta or logprobs or self.parsed.return_token_ids:
            yield self._chunk(index, {"content": delta} if self.chat else delta, logprobs=logprobs, part=part)

    def end(self, completions: list[Completion]) -> Iterator[dict[str, Any]]:
        """What is left of every choice, its finish reason, and the usage when asked for."""
        versions = {"policy_versions": wire.distinct_versions(completions)}
        for index, completion in enumerate(completions):
            yield from self._end_of(index, completion, versions)
        if self.parsed.include_usage:
            yield self.head | {"choices": [], "usage": wire.usage(self.parsed.prompt_ids, completions)} | versions

    def _end_of(self, index: int, completion: Completion, versions: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not self.chat:
            rest = self.streams[index].take(final=True)
            yield self._chunk(index, rest, reason=completion.finish_reason) | versions
            return
        message, reason = self.writer.message(self.parsed, completion)
        delta: dict[str, Any] = {}
        if message.get("tool_calls"):
            delta["tool_calls"] = [{"index": number} | call for number, call in enumerate(message["tool_calls"])]
            if message["content"]:
                delta["content"] = message["content"]
        else:
            rest = self.streams[index].take(final=True)
            if rest:
                delta["content"] = rest
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
