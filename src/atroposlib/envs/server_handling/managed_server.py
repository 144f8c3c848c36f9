"""``ManagedServer``: the chat API outside, an exact record of tokens inside.

    messages ──template──▶ prompt text ──▶ does a recorded sequence begin it?
                                            yes: its ids verbatim + the ids of what is new
                                            no:  the ids of the whole text
    ids ──▶ server ──▶ sampled ids, log-probs ──▶ node: what was sent is masked, what was sampled is not

What is trained is what was sampled: text is never tokenised a second time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.api_server import can_fail_over, is_watched
from atroposlib.envs.server_handling.chat_prompts import (
    conversation_keys,
    plain_messages,
    render_chat,
    turn_end_of,
    with_reasoning_in_content,
)
from atroposlib.envs.server_handling.dummy_managed_server import DummyManagedServer, ManagedServerAdapter
from atroposlib.envs.server_handling.managed_replies import chat_reply, completion_reply, finish_reason_text
from atroposlib.envs.server_handling.policy_versions import record_sequence_versions
from atroposlib.envs.server_handling.sequence_tree import (
    Prefix,
    SequenceNode,
    SequenceTree,
    Turn,
    end_of_turn,
    prefix_of,
    recorded_node,
    suffix_after_reply,
    turn_of,
)
from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator
from atroposlib.errors import (
    AtroposError,
    ConfigError,
    InferenceServerError,
    InferenceTimeoutError,
    InferenceUnavailableError,
)

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

__all__ = ["DummyManagedServer", "ManagedServer", "ManagedServerAdapter", "SequenceNode"]

logger = logging.getLogger(__name__)

# Fields of chat requests that say nothing to a server that continues ids.
# fmt: off
CHAT_ONLY_FIELDS = frozenset({
    "audio", "cache_salt", "function_call", "functions", "logprobs", "metadata", "modalities", "parallel_tool_calls",
    "prediction", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "response_format", "return_token_ids",
    "safety_identifier", "service_tier", "skip_reasoning", "store", "stream", "stream_options", "top_logprobs", "user",
    "verbosity", "web_search_options",
})
# fmt: on
_warned_about: set[str] = set()


class ManagedServer:
    """A session on one server that keeps every sequence with its ids, mask and log-probs.

    Example::

        async with env.server.managed_server(tokenizer=env.tokenizer) as managed:
            await managed.chat_completion(messages=messages, n=8, max_tokens=512)
            nodes = managed.get_state()["nodes"]  # 8 nodes with tokens, masked_tokens, logprobs

    ``preserve_think_blocks``: think blocks of earlier assistant turns always survive templating; True also restores
    reasoning handed back in a field of its own; None leaves earlier turns to the template.
    """

    def __init__(
        self,
        server: Any,
        tokenizer: Any = None,
        track_tree: bool = False,
        tool_parser: str | None = None,
        preserve_think_blocks: bool | None = False,
        reroute: Callable[[Any, Sequence[Any]], Awaitable[Any]] | None = None,
        other_servers: Sequence[Any] = (),
    ) -> None:
        self.server = server
        self.tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(server)
        self.track_tree = track_tree
        self.preserve_think_blocks = preserve_think_blocks
        self.sequences: dict[str, SequenceNode] = {}
        self._tool_parser_name = tool_parser
        self._translator: ToolCallTranslator | None = None
        self._tree = SequenceTree(keep_all=track_tree)
        self._reroute = reroute  # (server to leave, servers to avoid) -> a server that is up
        self._other_servers = other_servers

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def current_nodes(self) -> list[SequenceNode]:
        """The recorded sequences, in order."""
        return self._tree.nodes

    @current_nodes.setter
    def current_nodes(self, nodes: list[SequenceNode]) -> None:
        self._tree.nodes = nodes

    def get_state(self) -> dict[str, Any]:
        """The record so far: ``nodes``, or in tree mode ``sequences`` (also as ``tree``) by full text."""
        if self.track_tree:
            return {"sequences": dict(self.sequences), "tree": dict(self.sequences)}
        return {"nodes": list(self._tree.nodes)}

    def reset(self) -> None:
        """Forget the record."""
        self._tree.clear()
        self.sequences = {}

    # -- calls ------------------------------------------------------------------------------------------------------

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Answer ``messages`` and record the sequences; ``tools`` need a tool parser."""
        return (await self.chat_completion_with_nodes(**kwargs))[0]

    async def chat_completion_with_nodes(self, **kwargs: Any) -> tuple[ChatCompletion, list[SequenceNode]]:
        """As ``chat_completion``, with the recorded node of every choice."""
        messages = self._prepared(kwargs.pop("messages"))
        tools = kwargs.pop("tools", None)
        tool_choice = kwargs.pop("tool_choice", None)
        template_kwargs = _template_kwargs(kwargs)
        translator = self._get_translator() if tools else None
        if tools and translator is None:
            _warn_once("tools", "tools were given but no tool parser is set: they are not shown to the model")
        tools = tools if translator is not None else None
        if kwargs.get("response_format"):
            _warn_once(
                "response_format", "response_format does not reach token calls: replies are not constrained by it"
            )
        prompt = self._convert_messages_to_prompt(messages, tools=tools, template_kwargs=template_kwargs)
        keys = conversation_keys(messages, tools)
        prefix = self._conversation_prefix(messages, keys, prompt, tools, template_kwargs)
        reply = await self._sample(prompt, prefix, kwargs, is_chat=True, keep_control_tokens=tools is not None)

        contents, reasons = [], []
        for turn, reason in zip(reply.turns, reply.finish_reasons, strict=True):
            content, tool_calls = turn.reply_text, None
            if translator is not None and tools:
                parsed, calls, _ = translator.parse_model_output(turn.reply_text, tool_choice or "auto", tools)
                content, tool_calls = parsed or "", [call.model_dump() for call in calls] if calls else None
                reason = "tool_calls" if calls and reason != "length" else reason
            message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
            turn.conversation = conversation_keys([*messages, message], tools)[-1]
            contents.append({"content": content or (None if tool_calls else ""), "tool_calls": tool_calls})
            reasons.append(reason)
        self._record(reply.turns, prompt, prefix)
        answer = chat_reply(self._model_name(), contents, reasons, reply.num_prompt_tokens, reply.num_sampled)
        return answer, [turn.node for turn in reply.turns]

    async def completion(self, **kwargs: Any) -> Completion:
        """Continue ``prompt`` and record the sequences."""
        prompt = kwargs.pop("prompt")
        prefix = None
        found = self._tree.find_text(prompt)
        if found is not None:
            turn, length, with_control = found
            prefix = prefix_of(turn, prompt[length:], drop_end=not with_control)
        reply = await self._sample(prompt, prefix, kwargs, is_chat=False, keep_control_tokens=False)
        self._record(reply.turns, prompt, prefix)
        texts = [turn.reply_text for turn in reply.turns]
        return completion_reply(
            self._model_name(), texts, reply.finish_reasons, reply.num_prompt_tokens, reply.num_sampled
        )

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Log-probs of a given prompt, conversation or id list, as the server gives them."""
        if not hasattr(self.server, "get_logprobs"):
            raise NotImplementedError(f"{type(self.server).__name__} does not implement get_logprobs")
        messages = kwargs.pop("messages", None)
        if messages is not None:
            kwargs["prompt"] = self._convert_messages_to_prompt(self._prepared(messages))
        if kwargs.get("prompt") is None and kwargs.get("input_ids") is None:
            raise ValueError("get_logprobs needs 'prompt', 'messages' or 'input_ids'")
        return await self.server.get_logprobs(**kwargs)  # type: ignore[no-any-return]

    # -- prompts ----------------------------------------------------------------------------------------------------

    def _prepared(self, messages: Sequence[Any]) -> list[dict[str, Any]]:
        plain = plain_messages(messages)
        return with_reasoning_in_content(plain) if self.preserve_think_blocks else plain

    def _convert_messages_to_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        translator = self._get_translator()
        shown = translator.convert_messages_for_template(list(messages)) if translator is not None else messages
        return render_chat(
            self.tokenizer,
            shown,
            add_generation_prompt=not messages or messages[-1].get("role") != "assistant",
            tools=tools,
            keep_thinking=self.preserve_think_blocks is not None,
            template_kwargs=template_kwargs,
        )

    def _get_translator(self) -> ToolCallTranslator | None:
        if self._translator is None and self._tool_parser_name is not None:
            self._translator = ToolCallTranslator(self.tokenizer, self._tool_parser_name)
        return self._translator

    def _conversation_prefix(
        self,
        messages: Sequence[dict[str, Any]],
        keys: Sequence[Any],
        prompt: str,
        tools: Sequence[Any] | None,
        template_kwargs: dict[str, Any] | None,
    ) -> Prefix | None:
        turn_end = turn_end_of(self.tokenizer)
        found = self._tree.find_conversation(keys)
        if found is None:
            by_text = self._tree.find_text(prompt)
            return self._text_prefix(by_text[0], prompt, turn_end) if by_text is not None else None
        count, turn = found
        prefix = self._text_prefix(turn, prompt, turn_end)
        if prefix is not None:
            return prefix
        if turn_end is not None and self.preserve_think_blocks is not None and count < len(messages):
            # The template writes this reply differently from how it was sampled, but may still only append after it.
            finished = self._convert_messages_to_prompt(messages[:count], tools, template_kwargs)
            if prompt.startswith(finished):
                end = end_of_turn(turn, turn_end)
                return prefix_of(turn, (turn_end.partition(end)[2] if end else turn_end) + prompt[len(finished) :])
        self._say_branching()
        return None

    @staticmethod
    def _text_prefix(turn: Turn, prompt: str, turn_end: str | None) -> Prefix | None:
        if not turn.begins(prompt):
            return None
        suffix = suffix_after_reply(prompt[turn.prompt_length :], turn, turn_end)
        return None if suffix is None else prefix_of(turn, suffix)

    def _say_branching(self) -> None:
        name = getattr(self.tokenizer, "name_or_path", type(self.tokenizer).__name__)
        _warn_once(
            f"template:{name}",
            f"the chat template of {name!r} rewrites earlier turns of a conversation, so what was sampled is not what the "
            "next prompt shows; each such turn starts a sequence of its own",
        )

    # -- sampling ---------------------------------------------------------------------------------------------------

    async def _sample(
        self, prompt: str, prefix: Prefix | None, kwargs: dict[str, Any], *, is_chat: bool, keep_control_tokens: bool
    ) -> _Reply:
        ids = self._input_ids(prompt, prefix, is_chat)
        fields = {name: value for name, value in kwargs.items() if not (is_chat and name in CHAT_ONLY_FIELDS)}
        with record_sequence_versions() as versions:
            raw = await self._ask({**fields, "prompt": prompt, "input_ids": ids})
        if raw is None:
            raise AtroposError(f"{type(self.server).__name__} has no reply for the prompt {prompt[-200:]!r}")
        prompt_ids, outputs, logprobs, reasons = raw
        prompt_ids = _flat(prompt_ids) or ids
        turns, finish_reasons = [], []
        for index, output in enumerate(outputs):
            reason = finish_reason_text(reasons[index] if index < len(reasons) else None)
            metadata = {"finish_reason": reason, **_versions(prefix, versions, index, len(outputs))}
            text, raw_text, end_text = self._decode(output, keep_control_tokens)
            node = recorded_node(
                prompt_ids=prompt_ids,
                prefix=prefix,
                output_ids=output,
                output_logprobs=logprobs[index] if index < len(logprobs) else [],
                full_text=prompt + text,
                metadata=metadata,
            )
            turns.append(turn_of(node, prompt_text=prompt, reply_raw=raw_text, reply_text=text, end_text=end_text))
            finish_reasons.append(reason)
        return _Reply(turns, finish_reasons, len(prompt_ids))

    async def _ask(self, request: dict[str, Any]) -> Any:
        """Ask the session's server, or another one when it is down: ids mean the same on all of them."""
        if self._reroute is None:
            return await self.server.tokens_and_logprobs_completion(**request)
        started = time.monotonic()
        failed: list[Any] = []
        while True:
            if self.server in failed or not getattr(self.server, "server_healthy", True):
                self.server = await self._reroute(self.server, failed)
            previous = can_fail_over.get()
            can_fail_over.set(True)
            try:
                return await self.server.tokens_and_logprobs_completion(**request)
            except InferenceUnavailableError:
                if not is_watched(self.server) or time.monotonic() - started > self.server.config.server_wait_s:
                    raise
            except InferenceServerError as error:
                if not error.retryable or isinstance(error, InferenceTimeoutError) or not self._has_other(failed):
                    raise
            finally:
                can_fail_over.set(previous)

    def _has_other(self, failed: list[Any]) -> bool:
        failed.append(self.server)
        return any(server not in failed for server in self._other_servers)

    def _input_ids(self, prompt: str, prefix: Prefix | None, is_chat: bool) -> list[int]:
        if self.tokenizer is None:
            raise AtroposError(
                "a managed session needs a tokenizer; pass tokenizer= or set tokenizer_name of the server"
            )
        if prefix is not None:
            new = self.tokenizer.encode(prefix.suffix_text, add_special_tokens=False) if prefix.suffix_text else []
            return [*prefix.tokens, *new]
        # A template writes its own control tokens; plain text gets the tokenizer's (and never two of the first).
        ids = list(self.tokenizer.encode(prompt, add_special_tokens=not is_chat))
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return ids[1:] if len(ids) > 1 and ids[0] == ids[1] == bos else ids

    def _decode(self, output: Sequence[int], keep_control_tokens: bool) -> tuple[str, str, str]:
        """Text for the caller, text with all control tokens, text of the one that ended the reply."""
        decode = self.tokenizer.decode
        raw = str(decode(list(output), skip_special_tokens=False))
        ended = bool(output) and output[-1] in self._control_ids()
        end_text = str(decode([output[-1]], skip_special_tokens=False)) if ended else ""
        if keep_control_tokens:
            return (raw.removesuffix(end_text) if end_text else raw), raw, end_text
        return str(decode(list(output), skip_special_tokens=True)), raw, end_text

    def _control_ids(self) -> frozenset[int]:
        if getattr(self, "_control_ids_of", None) is not self.tokenizer:
            known = set(getattr(self.tokenizer, "all_special_ids", None) or ())
            known.add(getattr(self.tokenizer, "eos_token_id", None))
            self._known_control_ids = frozenset(token for token in known if isinstance(token, int))
            self._control_ids_of = self.tokenizer
        return self._known_control_ids

    def _record(self, turns: Sequence[Turn], prompt: str, prefix: Prefix | None) -> None:
        self._tree.add(turns, prompt, prefix.turn if prefix is not None else None)
        if self.track_tree:
            for turn in turns:
                key, copies = turn.node.full_text, 1
                while key in self.sequences:
                    copies += 1
                    key = f"{turn.node.full_text} #{copies}"
                self.sequences[key] = turn.node

    def _model_name(self) -> str:
        return str(getattr(getattr(self.server, "config", None), "model_name", "unknown"))


class _Reply:
    """The choices of one call."""

    def __init__(self, turns: list[Turn], finish_reasons: list[str], num_prompt_tokens: int) -> None:
        self.turns, self.finish_reasons, self.num_prompt_tokens = turns, finish_reasons, num_prompt_tokens

    @property
    def num_sampled(self) -> int:
        """Ids sampled over all choices."""
        return sum(len(turn.node.tokens) - self.num_prompt_tokens for turn in self.turns)


def _flat(ids: Any) -> list[int]:
    flat = list(ids or [])
    return list(flat[0]) if flat and isinstance(flat[0], list) else flat


def _versions(prefix: Prefix | None, per_sequence: list[list[int]], index: int, num_outputs: int) -> dict[str, Any]:
    if len(per_sequence) != num_outputs:
        return {}
    earlier = prefix.turn.policy_versions if prefix is not None else ()
    return {"policy_versions": sorted({*earlier, *per_sequence[index]})}


def _template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any] | None:
    extra = dict(kwargs.pop("extra_body", None) or {})
    options: dict[str, Any] | None = extra.pop("chat_template_kwargs", None) or kwargs.pop("chat_template_kwargs", None)
    if extra:
        kwargs["extra_body"] = extra
    return options


def _tokenizer_of(server: Any) -> Any:
    try:
        tokenizer = getattr(server, "tokenizer", None)
        if tokenizer is None:
            from atroposlib.utils.tokenizers.loading import load_tokenizer

            name = getattr(server.config, "tokenizer_name", "none")
            tokenizer = load_tokenizer(server.config.model_name if name in ("", "none") else name)
    except (ConfigError, AttributeError) as error:
        logger.warning("no tokenizer for the managed session: %s", error)
        return None
    return tokenizer


def _warn_once(key: str, message: str) -> None:
    if key not in _warned_about:
        _warned_about.add(key)
        logger.warning("%s", message)
