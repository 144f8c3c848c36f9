"""vLLM's /generate: what is sent, and every form of reply that is understood."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.envs.server_handling import sglang_server, vllm_server
from atroposlib.envs.server_handling.openai_server import resolve_openai_configs
from atroposlib.envs.server_handling.policy_versions import record_policy_versions, record_sequence_versions
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_harness import deterministic_logprob
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer, prompt_top_logprobs, sampled_tokens
from atroposlib.errors import InferenceServerError
from atroposlib.testing.harness_server import HarnessServer


def _server(harness: HarnessServer, kind: Any = VLLMServer, **settings: Any) -> Any:
    server = kind(APIServerConfig(base_url=harness.base_url, model_name="m", health_check=False, **settings))
    server.tokenizer = harness.tokenizer
    return server


async def test_ids_are_sent_and_come_back_exactly(harness: HarnessServer) -> None:
    harness.reply, harness.policy_versions = ["ab", "c"], [1, 2]
    with record_policy_versions() as seen, record_sequence_versions() as per_sequence:
        prompt, outputs, logprobs, reasons = await _server(harness).tokens_and_logprobs_completion(
            input_ids=[40, 41], prompt="not used", n=2, max_new_tokens=9, temperature=0.7, split="train"
        )
    encode, end = harness.tokenizer.encode, harness.tokenizer.eos_token_id
    assert prompt == [40, 41]
    assert outputs == [[*encode("ab"), end], [*encode("c"), end]]
    assert logprobs == [[deterministic_logprob(token, i) for i, token in enumerate(ids)] for ids in outputs]
    assert reasons == ["stop", "stop"]
    assert harness.bodies("/generate") == [
        {"prompt": {"prompt_token_ids": [40, 41]}, "logprobs": 0, "n": 2, "temperature": 0.7, "max_tokens": 9}
    ]
    assert (seen, per_sequence) == ({1, 2}, [[1, 2], [1, 2]])


async def test_text_is_encoded_and_a_doubled_bos_collapses(harness: HarnessServer) -> None:
    server = _server(harness)
    prompt, *_ = await server.tokens_and_logprobs_completion(prompt="hey", max_completion_tokens=3)
    assert prompt == harness.tokenizer.encode("hey")
    assert harness.bodies("/generate")[0]["max_tokens"] == 3
    harness.tokenizer.bos_token = "<|im_start|>"
    bos = harness.tokenizer.bos_token_id
    assert server.prompt_ids({"input_ids": [bos, bos, 5]}) == [bos, 5]
    assert server.prompt_ids({"input_ids": [bos, 5]}) == [bos, 5]
    with pytest.raises(ValueError, match="needs 'input_ids' or 'prompt'"):
        server.prompt_ids({})


async def test_a_session_lends_its_tokenizer(tiny_tokenizer: Any) -> None:
    """A prompt of two equal first ids must not make a server load a tokenizer called 'default'."""
    manager = ServerManager([APIServerConfig(base_url="http://127.0.0.1:9/v1", server_type="vllm", health_check=False)])
    async with manager.managed_server(tokenizer=tiny_tokenizer):
        assert manager.servers[0].prompt_ids({"input_ids": [70, 70, 71]}) == [70, 70, 71]


async def test_n_as_single_requests(harness: HarnessServer) -> None:
    server = _server(harness, n_kwarg_is_ignored=True)
    _, outputs, logprobs, reasons = await server.tokens_and_logprobs_completion(input_ids=[40], n=3)
    assert (len(outputs), len(logprobs), reasons) == (3, 3, ["stop"] * 3)
    assert len(harness.bodies("/generate")) == 3


def test_forms_of_log_probs() -> None:
    expected = ([[5, 6]], [[-0.5, -1.0]])
    assert sampled_tokens({"logprobs": [[[{"5": -0.5}], [{"6": -1.0}]]]}) == expected
    assert sampled_tokens({"logprobs": [[{"5": -0.5}, {"6": -1.0}]]}) == expected
    assert sampled_tokens({"logprobs": [[{"5": {"logprob": -0.5}}, {"6": {"logprob": -1.0}}]]}) == expected
    assert sampled_tokens({"logprobs": [[-0.5, -1.0]], "token_ids": [[5, 6]]}) == expected
    top_two = [[{"9": -0.1, "5": -0.5}], [{"6": -1.0}]]
    assert sampled_tokens({"logprobs": [top_two], "token_ids": [[5, 6]]}) == expected
    with pytest.raises(ValueError, match="neither a number nor a mapping"):
        sampled_tokens({"logprobs": [[-0.5]]})


async def test_a_server_without_log_probs_is_named(harness: HarnessServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HarnessServer, "_generate", lambda self, body: {"text": ["x"]})
    harness.stop()
    harness.start()
    with pytest.raises(InferenceServerError, match="sent no 'logprobs'"):
        await _server(harness).tokens_and_logprobs_completion(input_ids=[1])


async def test_given_text_is_scored(harness: HarnessServer) -> None:
    scored = await _server(harness).get_logprobs(input_ids=[50, 60, 70], top_k=2)
    assert scored["prompt_tokens"] == [50, 60, 70]
    assert scored["prompt_topk_token_ids"] == [[], [60, 61], [70, 71]]
    assert scored["prompt_topk_logprobs"][1] == [deterministic_logprob(60, 1), deterministic_logprob(60, 1) - 1]
    body = harness.bodies("/generate")[0]
    assert (body["prompt_logprobs"], body["n"], body["temperature"], body["top_p"], body["max_tokens"]) == (
        2,
        1,
        0.0,
        1.0,
        1,
    )
    assert (await _server(harness).get_logprobs(prompt="ab"))["prompt_tokens"] == harness.tokenizer.encode("ab")


def test_forms_of_prompt_log_probs() -> None:
    expected = ([[], [5], [6]], [[], [-0.5], [-1.0]])
    flat = [None, {"5": -0.5}, {"6": {"logprob": -1.0}}]
    assert prompt_top_logprobs(flat) == expected
    assert prompt_top_logprobs([flat]) == expected
    assert prompt_top_logprobs([None, [{"5": -0.5}], [{"6": -1.0}]]) == expected


async def test_no_prompt_log_probs_is_an_error(harness: HarnessServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HarnessServer, "_scored", lambda self, ids, top: {"logprobs": [[]], "finish_reasons": ["stop"]})
    with pytest.raises(ValueError, match="prompt_logprobs"):
        await _server(harness).get_logprobs(input_ids=[1, 2], top_k=1)


async def test_sglang_generate(harness: HarnessServer) -> None:
    harness.reply = ["ab", "c"]
    prompt, outputs, logprobs, reasons = await _server(harness, SGLangServer).tokens_and_logprobs_completion(
        input_ids=[40, 41], n=2, max_tokens=9, temperature=0.7
    )
    end = harness.tokenizer.eos_token_id
    assert prompt == [40, 41]
    assert outputs == [[*harness.tokenizer.encode("ab"), end], [*harness.tokenizer.encode("c"), end]]
    assert logprobs[1] == [deterministic_logprob(token, i) for i, token in enumerate(outputs[1])]
    assert reasons == [{"type": "stop"}, {"type": "stop"}]
    assert harness.bodies("/generate") == [
        {
            "input_ids": [40, 41],
            "sampling_params": {"n": 2, "temperature": 0.7, "max_new_tokens": 9},
            "return_logprob": True,
            "return_text_in_logprobs": False,
        }
    ]
    _, single, _, _ = await _server(harness, SGLangServer).tokens_and_logprobs_completion(input_ids=[40], max_tokens=1)
    assert len(single) == 1
    scored = await _server(harness, SGLangServer).get_logprobs(input_ids=[50, 60], top_k=2)
    assert scored["prompt_topk_token_ids"] == [[], [60, 61]]


def test_the_resolver_is_importable_from_both_backends() -> None:
    assert vllm_server.resolve_openai_configs is sglang_server.resolve_openai_configs is resolve_openai_configs


def test_the_tokenizer_is_loaded_by_name(tiny_tokenizer_dir: Any) -> None:
    for settings in (
        {"model_name": str(tiny_tokenizer_dir)},
        {"model_name": "m", "tokenizer_name": str(tiny_tokenizer_dir)},
    ):
        server = VLLMServer(APIServerConfig(base_url="http://x/v1", **settings))
        assert server.tokenizer.encode("a") == [server.tokenizer.convert_tokens_to_ids("a")]


class PlainVLLM:
    """The HTTP side of `vllm serve`: no /generate, token ids through /v1/completions."""

    def __init__(self, *names: str, **changes: Any) -> None:
        self.urls: list[str] = []
        self.names = list(names)
        """what /weight_info answers, one after the other; empty: the server has no such route"""
        self.bodies: list[dict[str, Any]] = []
        self.choice = {
            "token_ids": [7, 8], "logprobs": {"token_logprobs": [-0.5, -1]}, "finish_reason": "length",
            "prompt_token_ids": [40, 41], "prompt_logprobs": [None, {"41": {"logprob": -2.0}, "9": {"logprob": -1.0}}], **changes,
        }  # fmt: skip

    async def request_json(self, method: str, url: str, **_: Any) -> Any:
        assert (method, url.rpartition("/")[2]) == ("GET", "weight_info")
        if not self.names:
            raise InferenceServerError("no such route", url=url, status=404)
        return {"weight_version": self.names.pop(0)}

    async def post_json(self, url: str, body: dict[str, Any], **_: Any) -> Any:
        self.urls.append(url.rpartition(":")[2].partition("/")[2])
        if url.endswith("/generate"):
            raise InferenceServerError("no such route", url=url, status=404)
        self.bodies.append(body)
        return {"choices": [self.choice] * body.get("n", 1)}


async def test_without_generate_exact_tokens_come_from_completions(harness: HarnessServer) -> None:
    server, plain = _server(harness), PlainVLLM()
    server.http = plain
    for _ in range(2):
        reply = await server.tokens_and_logprobs_completion(input_ids=[40, 41], n=2, max_new_tokens=2, temperature=0.7)
        assert reply == ([40, 41], [[7, 8], [7, 8]], [[-0.5, -1.0]] * 2, ["length", "length"])
    assert plain.urls == ["generate", "v1/completions", "v1/completions"]
    assert plain.bodies[0] == {
        "model": "m", "prompt": [40, 41], "logprobs": 0, "return_token_ids": True, "n": 2, "max_tokens": 2, "temperature": 0.7,
    }  # fmt: skip
    scored = await server.get_logprobs(input_ids=[40, 41], top_k=2)
    assert scored["prompt_topk_token_ids"] == [[], [41, 9]]
    assert scored["prompt_topk_logprobs"] == [[], [-2.0, -1.0]]


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["/out/v2", "/out/v2"], {2}), (["/out/v2", "/out/v4"], {2, 3, 4}), (["default", "default"], set()), ([], set())],
)
async def test_versions_are_those_of_the_pushed_weights(
    names: list[str], expected: set[int], harness: HarnessServer
) -> None:
    server = _server(harness)
    server.http = PlainVLLM(*names)
    with record_policy_versions() as seen:
        await server.tokens_and_logprobs_completion(input_ids=[40, 41])
    assert seen == expected


async def test_a_server_that_merges_entries_is_refused(harness: HarnessServer) -> None:
    server = _server(harness)
    server.http = PlainVLLM(token_ids=[7, 8, 9])
    with pytest.raises(InferenceServerError, match="as many logprobs"):
        await server.tokens_and_logprobs_completion(input_ids=[40, 41])
