"""The vLLM server path against a server with vLLM's routes and a real tiny model behind them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_like_server import VLLMLikeServer

from atlaslib.errors import SamplerError
from atlaslib.generation.vllm_server_sampler import VLLMClient
from atlaslib.generation.weight_export import export_weights
from atlaslib.models.tiny import tiny_llama
from atlaslib.trainers import GRPOConfig, GRPOTrainer


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


@pytest.mark.timeout(200)
def test_two_sharded_processes_push_whole_weights_once(
    serve: Any, tmp_path: Path, tiny_tokenizer_dir: Path, tiny_tokenizer: Any
) -> None:
    server = serve(make_model(tiny_tokenizer, seed=5))
    config = {
        "output_dir": str(tmp_path / "out"), "use_vllm_server": True, "vllm_host": "127.0.0.1", "vllm_port": server.port, "max_steps": 2,
        "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "beta": 0.0, "learning_rate": 0.05,
        "lr_scheduler_type": "constant", "warmup_ratio": 0.0, "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps({"config": config, "tokenizer": str(tiny_tokenizer_dir)}))
    script = Path(__file__).parents[2] / "invariants" / "process_run.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script), str(tmp_path / "run.json")]  # fmt: skip
    sharding = {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }  # fmt: skip
    variables = {**os.environ, **sharding, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=variables, text=True, capture_output=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert [Path(folder).name for folder in server.reloads] == ["v0", "v1"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert all(line["policy/mismatch_abs"] < 1e-4 for line in lines)


def two_neighbours(serve: Any, tiny_tokenizer: Any) -> tuple[Any, Any]:
    """Servers on a port and the next one, wherever both are free."""
    for _ in range(20):
        first = serve(make_model(tiny_tokenizer))
        try:
            return first, serve(make_model(tiny_tokenizer), port=first.port + 1)
        except OSError:  # somebody else has it
            continue
    raise AssertionError("no two free ports side by side")


def test_requests_are_spread_over_the_clients(serve: Any, train: Any, tiny_tokenizer: Any) -> None:
    first, second = two_neighbours(serve, tiny_tokenizer)
    train(first.port, num_vllm_clients=2, max_steps=1)
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
