"""``exact=True``: the trainer's log-probs are the sampler's, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from metric_lines import read_metrics

from atlaslib.errors import ConfigError
from atlaslib.models.zoo import tiny_causal_lm
from atlaslib.trainers import GRPOTrainer
from atroposlib.testing.api import serve_api


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral_window", "gemma2"])
def test_sampler_and_trainer_agree_to_the_last_bit(
    name: str, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any
) -> None:
    config = make_config(
        exact=True,
        max_steps=3,
        temperature=0.7,
        logprob_chunk_size=40,
        backprop_accumulation_steps=2,
        max_completion_length=20,
    )
    GRPOTrainer(tiny_causal_lm(name), letters, config, train_dataset=rows, processing_class=tiny_tokenizer).train()
    for line in read_metrics(config.output_dir):
        assert line["policy/mismatch_abs"] == 0.0
        assert line["policy/ratio_mean"] == 1.0
        assert line["train/grad_norm"] > 0.0


def test_the_update_is_the_ordinary_one(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any
) -> None:
    weights, lines = [], []
    for exact in (False, True):
        config = make_config(
            exact=exact, max_steps=1, beta=0.04, entropy_coef=0.01, num_iterations=1, deterministic=True, optim="sgd"
        )
        model = small_model()
        GRPOTrainer(model, letters, config, train_dataset=rows, processing_class=tiny_tokenizer).train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        lines.append(read_metrics(config.output_dir)[-1])
    start = torch.cat([parameter.detach().flatten() for parameter in small_model().parameters()])
    assert float((weights[1] - start).norm()) > 1e-4
    torch.testing.assert_close(weights[1] - start, weights[0] - start, atol=1e-6, rtol=1e-3)
    for name in ("policy/entropy", "kl", "reward", "train/grad_norm"):
        assert lines[1][name] == pytest.approx(lines[0][name], rel=1e-4, abs=1e-8), name


def test_with_an_adapter(small_model: Any, make_config: Any, tiny_tokenizer: Any, rows: Any, letters: Any) -> None:
    from peft import LoraConfig

    config = make_config(exact=True, max_steps=2, beta=0.01)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    trainer = GRPOTrainer(
        small_model(), letters, config, train_dataset=rows, processing_class=tiny_tokenizer, peft_config=adapter
    )
    trainer.train()
    assert [line["policy/mismatch_abs"] for line in read_metrics(config.output_dir)] == [0.0, 0.0]


def test_through_the_policy_server_and_the_rollout_server(
    small_model: Any, make_config: Any, tiny_tokenizer: Any, letter_environment: Any
) -> None:
    with serve_api() as api:
        config = make_config(exact=True, rollout_server_url=api.url, policy_server_port=0, max_steps=1)
        trainer = GRPOTrainer(small_model(), args=config, processing_class=tiny_tokenizer)
        letter_environment(api.url, lambda: trainer.sampler_host.policy_server_url, tiny_tokenizer)
        trainer.train()
    (line,) = read_metrics(config.output_dir)
    assert line["policy/mismatch_abs"] == 0.0
    assert line["policy/ratio_mean"] == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "transformers"}, "needs the embedded engine; the sampler is 'transformers'"),
        ({"packing": "shared_prefix"}, "padded rows; packing is 'shared_prefix'"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing=True do not go together"),
        ({"compile_modules": True}, "compile_modules=True do not go together"),
        ({"bf16": True}, "load the model in that type"),
    ],
)
def test_what_does_not_go_together(make_config: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(exact=True, **changes)
