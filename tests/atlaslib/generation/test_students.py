"""Students in process and behind a real endpoint."""

from __future__ import annotations

from typing import Any

import pytest

from atlaslib.engine import Engine, EngineConfig, EngineThread
from atlaslib.engine.server import serve_in_thread
from atlaslib.errors import ConfigError, StudentError
from atlaslib.generation.engine_sampler import EngineSampler
from atlaslib.generation.protocol import SamplingSettings
from atlaslib.generation.students import EndpointStudent, ModelStudent

CHATS = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]
SETTINGS = SamplingSettings(max_tokens=8)


def test_model_student_is_reproducible(tiny_model: Any, tiny_tokenizer: Any) -> None:
    sampler = EngineSampler(Engine(tiny_model, tiny_tokenizer, EngineConfig(max_model_len=128)))
    student = ModelStudent(sampler, tiny_tokenizer, max_prompt_length=100, stop_token_ids=(2,))
    first = student.answer(CHATS, SETTINGS, seed=1)
    assert first == student.answer(CHATS, SETTINGS, seed=1)
    assert first != student.answer(CHATS, SETTINGS, seed=2)
    assert all(1 <= reply.num_tokens <= 8 for reply in first)


def test_endpoint_student(tiny_model: Any, tiny_tokenizer: Any) -> None:
    loop = EngineThread(Engine(tiny_model, tiny_tokenizer, EngineConfig(max_model_len=128)))
    loop.start()
    handle = serve_in_thread(loop, tiny_tokenizer)
    try:
        student = EndpointStudent(f"{handle.url}/v1")
        replies = student.answer(CHATS, SETTINGS, seed=1)
        assert replies == student.answer(CHATS, SETTINGS, seed=1)
        assert all(1 <= reply.num_tokens <= 8 for reply in replies)
    finally:
        handle.stop()
        loop.stop()


def test_endpoint_that_refuses_is_named(free_port: int) -> None:
    student = EndpointStudent(f"http://127.0.0.1:{free_port}/v1", timeout_s=1)
    with pytest.raises(StudentError, match=f"the student at http://127.0.0.1:{free_port}/v1"):
        student.answer(CHATS[:1], SETTINGS, seed=0)


def test_address_must_be_one() -> None:
    with pytest.raises(ConfigError, match="must start with http"):
        EndpointStudent("localhost:9004")
