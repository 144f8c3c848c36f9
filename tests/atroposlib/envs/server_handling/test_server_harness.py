"""Canned replies by conversation and prompt."""

from __future__ import annotations

from openai.types.chat.chat_completion import ChatCompletion

from atroposlib.envs.server_handling.server_harness import (
    DeterministicServer,
    ServerHarness,
    create_chat_completion,
    create_completion,
)

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]


async def test_set_replies_are_found_and_others_are_none() -> None:
    harness = ServerHarness()
    harness.set_desired_response(MESSAGES, create_chat_completion("hello", n=2))
    harness.set_desired_completion("p", create_completion("text", finish_reason="length"))
    harness.set_tokens_and_logprobs_response("p", [1], [[2, 3]], [[-0.1, -0.2]], ["stop"])
    assert len((await harness.chat_completion(messages=MESSAGES)).choices) == 2
    assert (await harness.completion(prompt="p")).choices[0].finish_reason == "length"
    assert await harness.tokens_and_logprobs_completion(prompt="p", n=1) == ([1], [[2, 3]], [[-0.1, -0.2]], ["stop"])
    assert await harness.chat_completion(messages=MESSAGES[:1]) is None
    assert await harness.completion(prompt="q") is None
    assert await harness.tokens_and_logprobs_completion(prompt="q") is None
    assert not hasattr(harness, "get_logprobs")
    await harness.update_weight(0.5)
    assert harness.conv_to_dictkey(MESSAGES) == "role:system\ncontent:s\nrole:user\ncontent:hi"


def test_reply_objects() -> None:
    reply = create_chat_completion("x", n=2, finish_reason="length")
    assert isinstance(reply, ChatCompletion)
    assert (reply.id, reply.model, reply.created) == ("test_id", "test_model", 0)
    assert [choice.finish_reason for choice in reply.choices] == ["length", "length"]
    assert create_completion(["a", "b"]).choices[1].text == "b"


async def test_the_deterministic_server_prefers_set_replies() -> None:
    server = DeterministicServer()
    server.set_desired_response(MESSAGES, create_chat_completion("canned"))
    assert (await server.chat_completion(messages=MESSAGES)).choices[0].message.content == "canned"
    prompt_ids, outputs, logprobs, reasons = await server.tokens_and_logprobs_completion(
        prompt="abc", max_tokens=4, n=2
    )
    assert prompt_ids == list(b"abc")
    assert [len(ids) for ids in outputs] == [4, 4]
    assert reasons == ["length", "length"]
    assert all(-2.0 <= value < 0 for values in logprobs for value in values)
