"""Exact tokens: what was sent and sampled is what is recorded, over turns, choices, tools and templates."""

from __future__ import annotations

import json
import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.server_handling import managed_server as managed_server_module
from atroposlib.envs.server_handling.managed_server import ManagedServer, ManagedServerAdapter
from atroposlib.envs.server_handling.policy_versions import note_reply_versions
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.errors import AtroposError

END = 2  # <|im_end|>
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
CALL = '<tool_call>{"name": "search", "arguments": {"query":  "cats"}}</tool_call>'


class IdServer:
    """Samples what the test says and remembers what it was sent."""

    def __init__(self, tokenizer: Any, replies: list[Any] | None = None) -> None:
        self.tokenizer, self.config = tokenizer, SimpleNamespace(model_name="m")
        self.replies: list[Any] = replies or []
        self.sent: list[list[int]] = []
        self.kwargs: list[dict[str, Any]] = []
        self.versions: list[list[int]] | None = None
        self.reason: Any = "stop"

    def _ids(self, reply: Any) -> list[int]:
        return [*self.tokenizer.encode(reply), END] if isinstance(reply, str) else reply

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Any:
        self.kwargs.append(kwargs)
        self.sent.append(list(kwargs["input_ids"]))
        outputs = [self._ids(self.replies.pop(0)) for _ in range(kwargs.get("n", 1))]
        logprobs = [[-(i + 1) / 100 for i in range(len(ids))] for ids in outputs]
        note_reply_versions({"policy_versions": self.versions} if self.versions else {}, len(outputs))
        return kwargs["input_ids"], outputs, logprobs, [self.reason] * len(outputs)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _trained(node: Any) -> list[int]:
    return [token for token in node.masked_tokens if token != -100]


def _check(node: Any) -> None:
    assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
    for token, mask, logprob in zip(node.tokens, node.masked_tokens, node.logprobs, strict=True):
        assert (mask == -100 and logprob == 1.0) or (mask == token and logprob < 0)


@pytest.fixture
def server(tiny_tokenizer: Any) -> IdServer:
    return IdServer(tiny_tokenizer)


async def test_one_completion(server: IdServer) -> None:
    server.replies = [" World"]
    managed = ManagedServer(server)
    reply = await managed.completion(prompt="Hello", temperature=0.5)
    node = managed.get_state()["nodes"][0]
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (" World", "stop")
    assert node.full_text == "Hello World"
    assert node.tokens == [*server.tokenizer.encode("Hello"), *server.tokenizer.encode(" World"), END]
    assert _trained(node) == [*server.tokenizer.encode(" World"), END]
    assert node.metadata == {"finish_reason": "stop"}
    assert server.kwargs[0]["prompt"] == "Hello"
    assert server.kwargs[0]["temperature"] == 0.5
    _check(node)


async def test_turns_of_a_chat_are_the_templates_ids_with_every_reply_trained(server: IdServer) -> None:
    server.replies = ["one", "two", "three"]
    managed = ManagedServer(server)
    messages = [_user("a")]
    for text in ("b", "c", None):
        reply = await managed.chat_completion(messages=messages)
        messages = [*messages, _assistant(reply.choices[0].message.content), *([_user(text)] if text else [])]
    (node,) = managed.get_state()["nodes"]
    rendered = server.tokenizer.apply_chat_template(messages, tokenize=False)
    assert node.tokens == server.tokenizer.encode(rendered.removesuffix("\n"))
    assert node.tokens.count(END) == 6
    assert server.tokenizer.decode(_trained(node)) == "one<|im_end|>two<|im_end|>three<|im_end|>"
    assert node.tokens[: len(server.sent[2])] == server.sent[2]
    _check(node)


async def test_random_ids_are_never_tokenised_again(server: IdServer) -> None:
    rng = random.Random(0)
    managed = ManagedServer(server)
    messages = [_user("start")]
    sampled: list[list[int]] = []
    for turn in range(6):
        # Bytes at random: most are no valid text, so encoding the decoded reply would give other ids.
        ids = [rng.randrange(3, 259) for _ in range(12)] + ([END] if turn % 2 == 0 else [])
        server.replies = [ids]
        server.reason = "stop" if turn % 2 == 0 else "length"
        reply = await managed.chat_completion(messages=messages)
        sampled.append(ids)
        messages = [*messages, _assistant(reply.choices[0].message.content), _user(f"turn {turn}")]
    (node,) = managed.get_state()["nodes"]
    assert _trained(node) == [token for ids in sampled for token in ids]
    assert node.tokens[: len(server.sent[-1])] == server.sent[-1]
    assert any(server.tokenizer.encode(server.tokenizer.decode(ids)) != ids for ids in sampled)
    _check(node)


async def test_a_reply_cut_by_length_gets_its_end_of_turn_from_the_template(server: IdServer) -> None:
    server.replies, server.reason = [server.tokenizer.encode("half")], "length"
    managed = ManagedServer(server)
    first = await managed.chat_completion(messages=[_user("a")])
    assert first.choices[0].finish_reason == "length"
    server.replies = ["rest"]
    await managed.chat_completion(messages=[_user("a"), _assistant("half"), _user("b")])
    (node,) = managed.get_state()["nodes"]
    assert "half<|im_end|>\n<|im_start|>user\nb" in server.tokenizer.decode(node.tokens)
    assert server.tokenizer.decode(_trained(node)) == "halfrest<|im_end|>"


@pytest.mark.parametrize("sent_back", ["  padded reply \n", "padded reply", "padded reply \n\n"])
async def test_stripped_replies_still_continue_their_sequence(server: IdServer, sent_back: str) -> None:
    server.replies = ["  padded reply \n", "next"]
    managed = ManagedServer(server)
    await managed.chat_completion(messages=[_user("a")])
    await managed.chat_completion(messages=[_user("a"), _assistant(sent_back), _user("b")])
    (node,) = managed.get_state()["nodes"]
    assert server.tokenizer.decode(_trained(node)) == "  padded reply \n<|im_end|>next<|im_end|>"
    assert server.tokenizer.decode(node.tokens).count("<|im_end|>") == 4


@pytest.mark.parametrize("template", ["chatml", "qwen3"])
async def test_another_control_token_at_the_end_does_not_end_the_turn(server: IdServer, template: str) -> None:
    if template == "qwen3":
        server.tokenizer.chat_template = QWEN3_LIKE
    server.replies = [[*server.tokenizer.encode("one"), 0], "two"]
    managed = ManagedServer(server)
    await managed.chat_completion(messages=[_user("a")])
    last = _user("b") if template == "chatml" else {"role": "tool", "content": "b"}
    await managed.chat_completion(messages=[_user("a"), _assistant("one"), last])
    (node,) = managed.get_state()["nodes"]
    assert f"one<|pad|><|im_end|>\n<|im_start|>{last['role']}\nb" in server.tokenizer.decode(node.tokens)
    assert server.tokenizer.decode(_trained(node)) == "one<|pad|>two<|im_end|>"


async def test_choices_are_continued_in_order(server: IdServer) -> None:
    server.replies = [f"Response{i}" for i in range(8)]
    managed = ManagedServer(server)
    await managed.chat_completion(messages=[_user("Hello")], n=8)
    for i in range(8):
        server.replies = [f"Continued{i}"]
        await managed.chat_completion(messages=[_user("Hello"), _assistant(f"Response{i}"), _user("go on")])
    nodes = managed.get_state()["nodes"]
    assert len(nodes) == 8
    for i, node in enumerate(nodes):
        assert server.tokenizer.decode(_trained(node)) == f"Response{i}<|im_end|>Continued{i}<|im_end|>"
    for i in range(8):
        server.replies = [f"More{i}"]
        messages = [{"role": "system", "content": "S"}, _user("Hello"), _assistant(f"Response{i}"), _user("go on")]
        await managed.chat_completion(messages=messages)
    assert len(managed.get_state()["nodes"]) == 16
    assert managed.current_nodes[:8] == nodes


async def test_equal_replies_keep_their_own_ids(server: IdServer) -> None:
    # Two spellings of one text: the bytes of "é" and the same bytes again after a control token that is not shown.
    one = [*server.tokenizer.encode("é"), END]
    two = [0, *server.tokenizer.encode("é"), END]
    server.replies = [one, two]
    managed = ManagedServer(server)
    reply = await managed.chat_completion(messages=[_user("a")], n=2)
    assert {choice.message.content for choice in reply.choices} == {"é"}
    for text in ("x", "y"):
        server.replies = [text]
        await managed.chat_completion(messages=[_user("a"), _assistant("é"), _user("b")])
    trained = [_trained(node) for node in managed.get_state()["nodes"]]
    assert trained == [[*one, *server._ids("x")], [*two, *server._ids("y")]]


async def test_a_second_continuation_of_one_turn_is_a_branch(server: IdServer) -> None:
    server.replies = ["root", "left", "right", "far right"]
    managed = ManagedServer(server)
    await managed.chat_completion(messages=[_user("a")])
    history = [_user("a"), _assistant("root"), _user("b")]
    await managed.chat_completion(messages=history)
    await managed.chat_completion(messages=history, n=2)
    trained = [server.tokenizer.decode(_trained(node)) for node in managed.get_state()["nodes"]]
    assert trained == [f"root<|im_end|>{name}<|im_end|>" for name in ("left", "right", "far right")]


async def test_completions_keep_earlier_turns_and_the_longest_prefix(server: IdServer) -> None:
    bare = server.tokenizer.encode
    server.replies = [bare("A"), bare("AB")]
    managed = ManagedServer(server)
    await managed.completion(prompt="P:", n=2)
    server.replies = [bare("!")]
    await managed.completion(prompt="P:AB, and")
    nodes = managed.get_state()["nodes"]
    assert [node.full_text for node in nodes] == ["P:A", "P:AB, and!"]
    assert server.tokenizer.decode(_trained(nodes[1])) == "AB!"
    assert server.sent[1] == bare("P:AB") + bare(", and")


async def test_completions_and_the_end_token(server: IdServer) -> None:
    server.replies = ["one", "two"]
    managed = ManagedServer(server)
    await managed.completion(prompt="Q")
    await managed.completion(prompt="Qone<|im_end|>\nmore")
    (node,) = managed.get_state()["nodes"]
    assert server.tokenizer.decode(node.tokens) == "Qone<|im_end|>\nmoretwo<|im_end|>"
    assert server.tokenizer.decode(_trained(node)) == "one<|im_end|>two<|im_end|>"
    server.replies = ["three"]
    managed.reset()
    server.replies = ["one", "two"]
    await managed.completion(prompt="Q")
    await managed.completion(prompt="Qone, more")
    assert server.tokenizer.decode(server.sent[-1]) == "Qone, more"


async def test_tree_mode_keeps_every_sequence(server: IdServer) -> None:
    server.replies = ["one", "two"]
    managed = ManagedServer(server, track_tree=True)
    await managed.chat_completion(messages=[_user("a")])
    await managed.chat_completion(messages=[_user("a"), _assistant("one"), _user("b")])
    state = managed.get_state()
    assert set(state) == {"sequences", "tree"}
    first, second = state["sequences"].values()
    assert server.tokenizer.decode(_trained(second)) == "one<|im_end|>two<|im_end|>"
    assert second.tokens[: len(first.tokens)] == first.tokens
    assert server.sent[1][: len(first.tokens)] == first.tokens
    assert list(state["sequences"]) == [first.full_text, second.full_text]
    managed.reset()
    assert managed.get_state() == {"sequences": {}, "tree": {}}


async def test_policy_versions_add_up(server: IdServer) -> None:
    managed = ManagedServer(server)
    server.replies, server.versions = ["one", "uno"], [[3], [3, 4]]
    await managed.chat_completion(messages=[_user("a")], n=2)
    server.replies, server.versions = ["two"], [[5]]
    await managed.chat_completion(messages=[_user("a"), _assistant("one"), _user("b")])
    metadata = [node.metadata for node in managed.get_state()["nodes"]]
    assert metadata == [
        {"finish_reason": "stop", "policy_versions": [3, 5]},
        {"finish_reason": "stop", "policy_versions": [3, 4]},
    ]


# -- tools ----------------------------------------------------------------------------------------------------------

TOOL_TEMPLATE = (
    "{% if tools %}TOOLS{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def test_tool_calls_over_many_turns_stay_one_sequence(server: IdServer) -> None:
    server.tokenizer.chat_template = TOOL_TEMPLATE
    managed = ManagedServer(server, tool_parser="hermes")
    messages: list[dict[str, Any]] = [_user("cats?")]
    expected = ""
    for turn in range(3):
        server.replies = [f"Look {turn}. {CALL}"]
        reply = await managed.chat_completion(messages=messages, tools=TOOLS)
        choice = reply.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == f"Look {turn}. "
        calls: Any = choice.message.tool_calls
        assert json.loads(calls[0]["function"]["arguments"]) == {"query": "cats"}
        assert json.loads(json.dumps(calls)) == calls
        assert reply.model_dump()["choices"][0]["message"]["tool_calls"] == calls
        expected += f"Look {turn}. {CALL}<|im_end|>"
        tool = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "5 cats"}
        messages = [*messages, _assistant(choice.message.content, tool_calls=calls), tool]
    server.replies = ["Five."]
    reply = await managed.chat_completion(messages=messages, tools=TOOLS)
    assert (reply.choices[0].message.content, reply.choices[0].message.tool_calls) == ("Five.", None)
    (node,) = managed.get_state()["nodes"]
    assert server.tokenizer.decode(_trained(node)) == expected + "Five.<|im_end|>"
    assert server.tokenizer.decode(node.tokens).startswith("TOOLS[")
    assert server.tokenizer.decode(node.tokens).count("<|im_end|>") == 8
    _check(node)


async def test_tool_choice_none_and_length(server: IdServer) -> None:
    server.tokenizer.chat_template = TOOL_TEMPLATE
    managed = ManagedServer(server, tool_parser="hermes")
    server.replies = [CALL]
    reply = await managed.chat_completion(messages=[_user("a")], tools=TOOLS, tool_choice="none")
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (CALL, "stop")
    assert "TOOLS" in server.kwargs[0]["prompt"]
    assert not {"tools", "tool_choice", "messages"} & set(server.kwargs[0])
    server.replies, server.reason = [server.tokenizer.encode("no call, cut")], "length"
    reply = await managed.chat_completion(messages=[_user("b")], tools=TOOLS)
    assert reply.choices[0].finish_reason == "length"


async def test_tools_need_a_parser(
    server: IdServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed_server_module, "_warned_about", set())
    server.tokenizer.chat_template = TOOL_TEMPLATE
    server.replies = [CALL]
    reply = await ManagedServer(server).chat_completion(messages=[_user("a")], tools=TOOLS)
    assert reply.choices[0].message.content == CALL
    assert "TOOLS" not in server.kwargs[0]["prompt"]
    assert "no tool parser" in caplog.text


# -- templates that are not append-only -----------------------------------------------------------------------------

QWEN3_LIKE = (  # thinking of turns before the last question is dropped; later replies always show a think block
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set c = m.content %}{% set think = '' %}"
    "{% if m.role == 'assistant' and '</think>' in c %}{% set think = c.split('</think>')[0].replace('<think>', '') %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>{{ think }}</think>{% endif %}{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = (
    "{{ '<|pad|>' }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


async def test_a_trimming_template_with_a_first_token(server: IdServer) -> None:
    server.tokenizer.chat_template = TRIMMING
    server.tokenizer.bos_token = "<|pad|>"
    server.replies = ["\n one \n", "two"]
    managed = ManagedServer(server)
    first = await managed.chat_completion(messages=[_user("a")])
    await managed.chat_completion(messages=[_user("a"), _assistant(first.choices[0].message.content), _user("b")])
    (node,) = managed.get_state()["nodes"]
    assert server.tokenizer.decode(node.tokens) == (
        "<|pad|>[user]a<|im_end|>[assistant]\n one \n<|im_end|>[user]b<|im_end|>[assistant]two<|im_end|>"
    )


async def test_thinking_survives_by_default(server: IdServer) -> None:
    server.tokenizer.chat_template = QWEN3_LIKE
    server.replies = ["<think>why</think>one", "<think>hm</think>two"]
    managed = ManagedServer(server)
    await managed.chat_completion(messages=[_user("a")])
    await managed.chat_completion(messages=[_user("a"), _assistant("<think>why</think>one"), _user("b")])
    (node,) = managed.get_state()["nodes"]
    assert server.tokenizer.decode(_trained(node)) == "<think>why</think>one<|im_end|><think>hm</think>two<|im_end|>"


async def test_tool_results_continue_a_reply_the_template_writes_differently(server: IdServer) -> None:
    server.tokenizer.chat_template = QWEN3_LIKE
    server.replies = ["no think block", "two"]
    managed = ManagedServer(server)
    await managed.chat_completion(messages=[_user("a")])
    await managed.chat_completion(messages=[_user("a"), _assistant("no think block"), {"role": "tool", "content": "r"}])
    (node,) = managed.get_state()["nodes"]
    assert server.tokenizer.decode(node.tokens) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nno think block<|im_end|>\n<|im_start|>tool\nr<|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>"
    )


async def test_a_template_that_drops_thinking_branches_and_says_so_once(
    server: IdServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed_server_module, "_warned_about", set())
    server.tokenizer.chat_template = QWEN3_LIKE
    managed = ManagedServer(server, preserve_think_blocks=None)
    messages = [_user("a")]
    with caplog.at_level(logging.WARNING):
        for i in range(3):
            server.replies = [f"<think>{i}</think>reply {i}"]
            reply = await managed.chat_completion(messages=messages)
            messages = [*messages, _assistant(reply.choices[0].message.content), _user(f"q{i}")]
    nodes = managed.get_state()["nodes"]
    assert [server.tokenizer.decode(_trained(node)) for node in nodes] == [
        f"<think>{i}</think>reply {i}<|im_end|>" for i in range(3)
    ]
    assert server.tokenizer.decode(server.sent[2]).count("<think>") == 0
    for sent, node in zip(server.sent, nodes, strict=True):
        assert node.tokens[: len(sent)] == sent
    assert caplog.text.count("rewrites earlier turns") == 1


async def test_a_generation_prompt_that_history_does_not_show_branches(server: IdServer) -> None:
    server.tokenizer.chat_template = QWEN3_LIKE.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think></think>{% endif %}"
    )
    managed = ManagedServer(server)
    server.replies = ["one", "two"]
    await managed.chat_completion(messages=[_user("a")])
    await managed.chat_completion(messages=[_user("a"), _assistant("one"), _user("b")])
    nodes = managed.get_state()["nodes"]
    assert [server.tokenizer.decode(_trained(node)) for node in nodes] == ["one<|im_end|>", "two<|im_end|>"]
    assert [node.tokens[: len(sent)] for node, sent in zip(nodes, server.sent, strict=True)] == server.sent
    assert "assistant\none<|im_end|>" in server.tokenizer.decode(server.sent[1])


async def test_preserve_think_blocks_restores_separate_reasoning(server: IdServer) -> None:
    server.tokenizer.chat_template = QWEN3_LIKE
    message = {"role": "assistant", "content": "one", "reasoning_content": "why"}
    managed = ManagedServer(server, preserve_think_blocks=True)
    server.replies = ["two"]
    await managed.chat_completion(messages=[_user("a"), message, _user("b")])
    assert "<think>why</think>one" in server.kwargs[0]["prompt"]


async def test_template_options_reach_the_template(server: IdServer) -> None:
    server.tokenizer.chat_template = "{{ 'FLAG' if enable_thinking else 'none' }}"
    server.replies = ["x"]
    await ManagedServer(server).chat_completion(
        messages=[_user("a")], extra_body={"chat_template_kwargs": {"enable_thinking": True}, "min_p": 0.1}
    )
    assert server.kwargs[0]["prompt"] == "FLAG"
    assert server.kwargs[0]["extra_body"] == {"min_p": 0.1}


# -- the rest -------------------------------------------------------------------------------------------------------


async def test_the_reply_is_an_openai_object(server: IdServer) -> None:
    from openai.types.chat.chat_completion import ChatCompletion

    server.replies, server.reason = ["abc", "de"], {"type": "stop", "matched": 2}
    reply = await ManagedServer(server).chat_completion(
        messages=[_user("q")],
        n=2,
        logprobs=True,
        stream=False,
        response_format={"type": "json_object"},
        logit_bias={5: 1},
    )
    assert isinstance(reply, ChatCompletion)
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "stop"]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(server.sent[0]), 7)
    assert not {"logprobs", "stream", "response_format"} & set(server.kwargs[0])
    assert server.kwargs[0]["logit_bias"] == {5: 1}


async def test_get_logprobs(server: IdServer) -> None:
    managed = ManagedServer(server)
    with pytest.raises(NotImplementedError, match="does not implement get_logprobs"):
        await managed.get_logprobs(prompt="p")
    asked: list[dict[str, Any]] = []

    async def get_logprobs(**kwargs: Any) -> dict[str, Any]:
        asked.append(kwargs)
        return {"prompt_tokens": []}

    server.get_logprobs = get_logprobs  # type: ignore[attr-defined]
    await managed.get_logprobs(messages=[_user("q")], top_k=1)
    await managed.get_logprobs(input_ids=[1])
    assert asked == [{"prompt": managed._convert_messages_to_prompt([_user("q")]), "top_k": 1}, {"input_ids": [1]}]
    with pytest.raises(ValueError, match="needs 'prompt'"):
        await managed.get_logprobs(n=1)


async def test_a_harness_reply_is_recorded_as_set(tiny_tokenizer: Any) -> None:
    harness = ServerHarness()
    harness.tokenizer = tiny_tokenizer
    managed = ManagedServer(harness)
    prompt = managed._convert_messages_to_prompt([_user("hi")])
    harness.set_tokens_and_logprobs_response(prompt, [9, 8, 7], [[5, 6]], [[-0.5]], ["stop"])
    await managed.chat_completion(messages=[_user("hi")])
    node = managed.get_state()["nodes"][0]
    assert (node.tokens, node.logprobs) == ([9, 8, 7, 5, 6], [1.0, 1.0, 1.0, -0.5, 1.0])
    with pytest.raises(AtroposError, match="has no reply"):
        await managed.chat_completion(messages=[_user("unknown")])


async def test_the_tokenizer_comes_from_the_server_or_its_model(
    tiny_tokenizer: Any, tiny_tokenizer_dir: Any, caplog: Any
) -> None:
    assert ManagedServer(IdServer(tiny_tokenizer)).tokenizer is tiny_tokenizer
    named = SimpleNamespace(config=SimpleNamespace(model_name=str(tiny_tokenizer_dir)))
    assert ManagedServer(named).tokenizer.eos_token_id == END
    missing = ManagedServer(SimpleNamespace(config=SimpleNamespace(model_name=str(tiny_tokenizer_dir / "none"))))
    assert missing.tokenizer is None
    assert "no tokenizer" in caplog.text
    with pytest.raises(AtroposError, match="needs a tokenizer"):
        await missing.completion(prompt="x")


async def test_an_adapter_looks_like_a_client(server: IdServer) -> None:
    server.replies = ["one", "two"]
    adapter = ManagedServerAdapter(ManagedServer(server), "http://x/v1")
    assert (await adapter.chat.completions.create(messages=[_user("q")], model="m")).choices[0].message.content == "one"
    assert (await adapter.completions.create(prompt="p")).choices[0].text == "two"
    assert adapter.base_url == "http://x/v1"
    with pytest.raises(NotImplementedError):
        await adapter.post()
    with pytest.raises(NotImplementedError):
        adapter.copy()


@pytest.mark.parametrize("template", [None, TRIMMING, QWEN3_LIKE])
@pytest.mark.parametrize("seed", range(4))
async def test_random_conversations_match_an_oracle(server: IdServer, template: str | None, seed: int) -> None:
    """Grow a random tree of conversations; every leaf must be one node that trains exactly the ids sampled on its path."""
    rng = random.Random(seed)
    if template is not None:
        server.tokenizer.chat_template = template
    managed = ManagedServer(server)
    # A conversation: its messages, the ids sampled on the way, and whether something has continued it.
    grown: list[dict[str, Any]] = [{"messages": [], "sampled": [], "continued": True}]
    for number in range(25):
        parent = rng.choice(grown)
        messages = [*parent["messages"], _user(f"question {number}")]
        n = rng.choice([1, 1, 2, 3])
        replies = []
        for _ in range(n):
            ids = [rng.choice([0, 1, *range(3, 259)]) for _ in range(rng.randrange(1, 8))]
            replies.append([*ids, END] if rng.random() < 0.7 else ids)
        server.replies = [list(ids) for ids in replies]
        reply = await managed.chat_completion(messages=messages, n=n)
        parent["continued"] = True
        for choice, ids in zip(reply.choices, replies, strict=True):
            text = choice.message.content or ""
            shown = text.strip() if rng.random() < 0.3 else text
            sampled = [*parent["sampled"], *ids]
            grown.append({"messages": [*messages, _assistant(shown)], "sampled": sampled, "continued": False})
        sent = server.sent[-1]
        assert all(node.tokens[: len(sent)] == sent for node in managed.current_nodes[-max(0, n - 1) :] if n > 1)
    leaves = sorted(conversation["sampled"] for conversation in grown if not conversation["continued"])
    assert sorted(_trained(node) for node in managed.get_state()["nodes"]) == leaves
    for node in managed.get_state()["nodes"]:
        _check(node)
