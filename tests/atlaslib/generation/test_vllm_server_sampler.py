"""The vLLM server path against a server with vLLM's routes and a real tiny model behind them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from atlaslib.errors import SamplerError
from atlaslib.generation.vllm_server_sampler import VLLMClient
from atlaslib.generation.weight_export import export_weights
from atlaslib.models.tiny import tiny_llama
from atlaslib.trainers import GRPOConfig, GRPOTrainer


class VLLMLikeServer:
    """vLLM's completion and reload routes over the embedded engine; ``stale_head`` reproduces the bug of a known build."""

    def __init__(self, model: Any, *, port: int = 0, stale_head: bool = False, raw_logprobs: bool = False) -> None:
        from atlaslib.engine import Engine

        self.model, self.stale_head, self.raw_logprobs = model, stale_head, raw_logprobs
        self.engine = Engine(model)
        self.requests: list[dict[str, Any]] = []
        self.weights_name = "default"
        self.forgets_after: int | None = None
        """requests after which it behaves like one that was started again"""
        self.reloads: list[str] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(outer.state(self.path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                with outer._lock:
                    self._reply(outer.answer(self.path, json.loads(body) if body else {}))

            def _reply(self, value: dict[str, Any]) -> None:
                data = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def state(self, path: str) -> dict[str, Any]:
        if path == "/weight_info":
            return {"weight_version": self.weights_name}
        return {"data": [{"id": "served", "max_model_len": 200}]} if path == "/v1/models" else {}

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/update_weight_version":
            self.weights_name = body["new_version"]
        if path == "/collective_rpc":
            self.reloads.append(body["kwargs"]["weights_path"])
            self._reload(Path(body["kwargs"]["weights_path"]))
        return self._complete(body) if path == "/v1/completions" else {}

    def _reload(self, folder: Path) -> None:
        from safetensors.torch import load_file

        state = load_file(folder / "model.safetensors")
        if self.stale_head:
            state.pop("lm_head.weight")
        with self.engine.updating():
            self.model.load_state_dict(state, strict=False)

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        from atlaslib.engine import SamplingParams

        self.requests.append(body)
        if len(self.requests) == self.forgets_after:
            self.weights_name = "default"
        params = SamplingParams(
            n=body["n"],
            seed=body["seed"],
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=max(body["top_k"], 0),
            stop_token_ids=body["stop_token_ids"],
        )
        choices = []
        for completion in self.engine.generate([body["prompt"]], params)[0]:
            values = completion.raw_logprobs if self.raw_logprobs else completion.temperature_logprobs
            choices.append(
                {
                    "token_ids": completion.token_ids,
                    "logprobs": {"token_logprobs": values},
                    "finish_reason": completion.finish_reason,
                }
            )
        return {"choices": choices}

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., VLLMLikeServer]]:
    started: list[VLLMLikeServer] = []

    def start(*args: Any, **options: Any) -> VLLMLikeServer:
        started.append(VLLMLikeServer(*args, **options))
        return started[-1]

    yield start
    for server in started:
        server.close()


def make_model(tokenizer: Any, seed: int = 0) -> Any:
    return tiny_llama(len(tokenizer), hidden=32, seed=seed, eos_token_id=tokenizer.eos_token_id)


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


@pytest.fixture
def train(tmp_path: Path, tiny_tokenizer: Any) -> Callable[..., GRPOTrainer]:
    def run(port: int, **options: Any) -> GRPOTrainer:
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
            "use_vllm_server": True,
            "vllm_host": "127.0.0.1",
            "vllm_port": port,
            "max_steps": 2,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 5,
            "beta": 0.0,
            "learning_rate": 0.05,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0.0,
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        }
        rows = [{"prompt": f"ask {n}"} for n in range(6)]
        trainer = GRPOTrainer(
            make_model(tiny_tokenizer),
            lengths,
            GRPOConfig(**settings),
            train_dataset=rows,
            processing_class=tiny_tokenizer,
        )
        trainer.train()
        return trainer

    return run


def metrics(trainer: GRPOTrainer) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(trainer.config.output_dir) / "metrics.jsonl").read_text().splitlines()]


def test_weights_are_pushed_before_each_round_and_samples_are_on_policy(
    serve: Any, train: Any, tiny_tokenizer: Any
) -> None:
    server = serve(make_model(tiny_tokenizer, seed=5))
    trainer = train(server.port)
    assert [Path(folder).name for folder in server.reloads] == ["v0", "v1"]
    for number, line in enumerate(metrics(trainer)):
        assert line["policy/mismatch_abs"] < 1e-4
        assert line["rollout/staleness_max"] == 0.0
        assert number < 2
    assert all(sample.policy_versions == [1] for sample in trainer.step_samples)
    trained = [body for body in server.requests if body["n"] == 4]
    assert {body["model"] for body in trained} == {"served"}
    assert all(isinstance(token, int) for token in trained[0]["prompt"])


class GivenBatches:
    """A rollout server's client with batches that are there already."""

    def __init__(self, server: VLLMLikeServer) -> None:
        self.server, self.seen = server, []

    def register(self, **_: Any) -> int:
        return 0

    def next_batch(self, **_: Any) -> Any:
        from atroposlib.api.client import Batch

        self.seen.append(list(self.server.reloads))
        group = {
            "tokens": [[5, 6, 7 + i] for i in range(8)],
            "masks": [[-100, 6, 7 + i] for i in range(8)],
            "scores": [float(i) for i in range(8)],
        }
        return Batch(seq=len(self.seen), groups=[group])

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def test_environments_on_vllm_servers_get_the_weights_of_every_step(
    serve: Any, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    server = serve(make_model(tiny_tokenizer, seed=5))
    config = GRPOConfig(
        output_dir=str(tmp_path), use_vllm_server=True, vllm_host="127.0.0.1", vllm_port=server.port, max_steps=2, num_generations=8,
        per_device_train_batch_size=8, beta=0.0, learning_rate=0.05, warmup_ratio=0.0, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        rollout_server_url="http://unused",
    )  # fmt: skip
    client = GivenBatches(server)
    GRPOTrainer(make_model(tiny_tokenizer), args=config, processing_class=tiny_tokenizer, rollout_client=client).train()
    assert [[Path(folder).name for folder in reloads] for reloads in client.seen] == [["v0"], ["v0", "v1"]]
    assert server.weights_name.endswith("/v2")


def test_requests_are_spread_over_the_clients(serve: Any, train: Any, tiny_tokenizer: Any, free_port: int) -> None:
    first = serve(make_model(tiny_tokenizer), port=free_port)
    second = serve(make_model(tiny_tokenizer), port=free_port + 1)
    train(free_port, num_vllm_clients=2, max_steps=1)
    assert [sum(body["n"] == 4 for body in server.requests) for server in (first, second)] == [1, 1]


def test_a_stale_head_is_found_out(serve: Any, train: Any, tiny_tokenizer: Any) -> None:
    server = serve(make_model(tiny_tokenizer), stale_head=True)
    with pytest.raises(SamplerError, match=r"does not carry the weights of version 1.*tied embeddings"):
        train(server.port, learning_rate=0.3, vllm_probe_tolerance=1e-3)


def test_samples_of_a_server_that_was_started_again_do_not_count(serve: Any, train: Any, tiny_tokenizer: Any) -> None:
    server = serve(make_model(tiny_tokenizer))
    server.forgets_after = 3  # a probe, then the two groups of the first step
    with pytest.raises(
        SamplerError, match=r"carries weights called 'default' instead of '.*/v0': it was started again"
    ):
        train(server.port)


def test_raw_logprobs_are_recognised_and_not_mistaken(serve: Any, train: Any, tiny_tokenizer: Any) -> None:
    server = serve(make_model(tiny_tokenizer), raw_logprobs=True)
    trainer = train(server.port, temperature=0.5, max_steps=1, vllm_probe_tolerance=1e-3)
    assert all(sample.sampler_logprobs is None for sample in trainer.step_samples)


def test_a_silent_server_is_named(free_port: int) -> None:
    with pytest.raises(SamplerError, match=f"127.0.0.1:{free_port} did not answer within 0.3 s"):
        VLLMClient(f"http://127.0.0.1:{free_port}", timeout_s=0.3).wait_until_ready()


def test_a_tied_head_is_written_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = tiny_llama(50, hidden=32, tie_embeddings=True)
    folder = export_weights(model, tmp_path / "export")
    assert torch.equal(load_file(folder / "model.safetensors")["lm_head.weight"], model.model.embed_tokens.weight)
    loaded = AutoModelForCausalLM.from_pretrained(str(folder))
    assert loaded.config.tie_word_embeddings is False
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_an_adapter_is_merged(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(
        tiny_llama(50, hidden=32), LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    loaded = AutoModelForCausalLM.from_pretrained(str(export_weights(model, tmp_path / "export")))
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(loaded(ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-5)
