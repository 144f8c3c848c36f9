"""vLLM in process: what reaches the engine that is started (a stand-in module records it; the real one is an opt-in tier)."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atlaslib.errors import ConfigError, SamplerError
from atlaslib.generation import vllm_sampler
from atlaslib.models.tiny import tiny_llama
from atlaslib.trainers import GRPOConfig, GRPOTrainer


class StandIn:
    """``vllm.LLM`` with the embedded engine inside."""

    made: dict[str, Any]
    calls: list[str]
    ignore_reload = False

    def __init__(self, **options: Any) -> None:
        from transformers import AutoModelForCausalLM

        from atlaslib.engine import Engine

        type(self).made, type(self).calls = options, []
        self.model = AutoModelForCausalLM.from_pretrained(options["model"])
        self.engine = Engine(self.model)

    def generate(self, prompts: list[dict[str, list[int]]], params: list[Any], use_tqdm: bool) -> list[Any]:
        from atlaslib.engine import SamplingParams

        self.calls.append("generate")
        settings = [
            SamplingParams(
                n=p.n, seed=p.seed, max_tokens=p.max_tokens, temperature=p.temperature, stop_token_ids=p.stop_token_ids
            )
            for p in params
        ]
        outputs = self.engine.generate([prompt["prompt_token_ids"] for prompt in prompts], settings)
        return [SimpleNamespace(outputs=[self._completion(completion) for completion in output]) for output in outputs]

    @staticmethod
    def _completion(completion: Any) -> Any:
        pairs = zip(completion.token_ids, completion.temperature_logprobs, strict=True)
        logprobs = [{token: SimpleNamespace(logprob=value)} for token, value in pairs]
        return SimpleNamespace(
            token_ids=completion.token_ids, logprobs=logprobs, finish_reason=completion.finish_reason
        )

    def collective_rpc(self, method: str, kwargs: dict[str, str]) -> None:
        from safetensors.torch import load_file

        self.calls.append(method)
        if not self.ignore_reload:
            with self.engine.updating():
                self.model.load_state_dict(load_file(Path(kwargs["weights_path"]) / "model.safetensors"), strict=False)

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")

    def wake_up(self) -> None:
        self.calls.append("wake_up")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep{level}")


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_tokenizer: Any) -> Any:
    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = StandIn, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(StandIn, "ignore_reload", False)

    def make(**options: Any) -> GRPOTrainer:
        config = GRPOConfig(
            **{
                "output_dir": str(tmp_path / "out"),
                "use_vllm": True,
                "vllm_dtype": "float32",
                "vllm_gpu_memory_utilization": 0.3,
                "vllm_max_model_len": 64,
                "per_device_train_batch_size": 8,
                "num_generations": 4,
                "max_completion_length": 5,
                "max_steps": 2,
                "beta": 0.0,
                "learning_rate": 0.05,
                "lr_scheduler_type": "constant",
                "warmup_ratio": 0.0,
                "report_to": [],
                "save_strategy": "no",
                "use_cpu": True,
                "disable_tqdm": True,
                "enable_prefix_caching": True,
                "enforce_eager": False,
                **options,
            }
        )
        model = tiny_llama(len(tiny_tokenizer), hidden=32, eos_token_id=tiny_tokenizer.eos_token_id)
        rows = [{"prompt": f"ask {n}"} for n in range(6)]
        return GRPOTrainer(
            model,
            lambda completions, **_: [len(text) for text in completions],
            config,
            train_dataset=rows,
            processing_class=tiny_tokenizer,
        )

    return make


def test_settings_reach_the_engine_and_weights_follow(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_sampler, "can_sleep", lambda: True)
    run = trainer()
    run.train()
    made = StandIn.made
    assert (made["dtype"], made["gpu_memory_utilization"], made["max_model_len"]) == ("float32", 0.3, 64)
    assert (made["enforce_eager"], made["enable_prefix_caching"], made["enable_sleep_mode"]) == (False, True, True)
    assert made["logprobs_mode"] == "processed_logprobs"
    assert StandIn.calls.count("reload_weights") == 1
    # awake while weights are written
    assert StandIn.calls[:5] == ["generate", "sleep1", "wake_up", "reload_weights", "reset_prefix_cache"]
    assert all(sample.policy_versions == [1] for sample in run.step_samples)


@pytest.mark.parametrize(("device", "expected"), [("auto", None), ("cuda", None), ("cuda:1", [1])])
def test_the_device_reaches_the_engine(
    device: str, expected: list[int] | None, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(device_type="cuda")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    assert trainer(vllm_device=device).sampler is not None
    assert StandIn.made.get("device_ids") == expected
    for wrong in ("cpu", "cuda:x"):
        with pytest.raises(ConfigError, match=f"vllm_device is '{wrong}', but the installed vLLM runs on 'cuda'"):
            vllm_sampler.device_options(wrong)


def test_sleep_level_zero_never_sleeps(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_sampler, "can_sleep", lambda: True)
    trainer(vllm_sleep_level=0, max_steps=1).train()
    assert StandIn.calls == ["generate"]


def test_an_engine_that_keeps_old_weights_is_found_out(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "ignore_reload", True)
    with pytest.raises(SamplerError, match="does not carry the weights of version 1"):
        trainer(learning_rate=0.3, vllm_probe_tolerance=1e-3).train()
    assert torch.get_num_threads() == 1
