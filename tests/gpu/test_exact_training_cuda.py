"""``exact=True`` on a GPU: the trainer's log-probs are the engine's, to the last bit, in float32 and bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampler_and_trainer_agree_to_the_last_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from atlaslib.models.zoo import tiny_causal_lm
    from atlaslib.trainers import GRPOConfig, GRPOTrainer
    from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 97) for ids in completion_ids]

    config = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=40,
        max_steps=3,
        temperature=0.7,
        learning_rate=1e-3,
        beta=0.0,
        logprob_chunk_size=100,
        exact=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        tiny_causal_lm(name).to(dtype),
        reward,
        config,
        train_dataset=[{"prompt": "say " + "abc" * number} for number in range(1, 9)],
        processing_class=AutoTokenizer.from_pretrained(str(make_tiny_tokenizer(tmp_path / "tokenizer"))),
    )
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["policy/mismatch_abs"] for line in lines] == [0.0] * 3
    assert [line["policy/ratio_mean"] for line in lines] == [1.0] * 3
    assert all(line["train/grad_norm"] > 0.0 for line in lines)


def test_log_probs_and_their_gradient() -> None:
    from atlaslib.engine.exact import exact_token_logprobs

    for vocab in (100, 4096, 151936):
        logits = 3 * torch.randn(9, vocab, device="cuda")
        tokens = torch.randint(0, vocab, (9,), device="cuda")
        temperature = torch.rand(9, device="cuda") + 0.5
        direction = torch.randn(9, device="cuda")
        results = []
        for wide in (False, True):
            x = (logits.double() if wide else logits).detach().requires_grad_()
            if wide:
                scaled = torch.log_softmax(x / temperature.double()[:, None], -1)
                found = scaled.gather(1, tokens[:, None])[:, 0]
            else:
                found = exact_token_logprobs(x, tokens, temperature)
            (found * direction).sum().backward()
            results.append((found.detach().double(), x.grad.double()))
        torch.testing.assert_close(results[0][0], results[1][0], atol=2e-5, rtol=1e-6)
        torch.testing.assert_close(results[0][1], results[1][1], atol=1e-6, rtol=1e-4)
        some = exact_token_logprobs(logits[3:5], tokens[3:5], temperature[3:5])
        assert torch.equal(some, exact_token_logprobs(logits, tokens, temperature)[3:5])
