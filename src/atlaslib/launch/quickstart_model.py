"""The quickstart's model: a Llama of 0.4M parameters made on the spot, and its few seconds of warm-up.

The warm-up stands for the pretraining a real model brings along: supervised, on answers of the right form of which one in
four is right and three are random. Held-out prompts do not occur in it. It leaves a model that knows letters and stopping and
is right now and then, which is what reinforcement learning needs to start from.
"""

from __future__ import annotations

import json
import logging
import os
import random
from pathlib import Path
from typing import Any

from atroposlib.envs.quickstart_task import LETTERS, answer_to, split_prompts

logger = logging.getLogger(__name__)

NUM_LETTERS, MAX_COUNT, HELD_OUT_SHARE = 12, 5, 0.2
"""As the environment `RepeatLetters` has them by default."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|im_end|>' }}{% else %}{{ '>' }}{% endif %}{% endfor %}"
)
"""A prompt is its text and ``>``: every token of a long template would be one more to learn to look past."""


def build_quickstart_model(folder: Path, *, seed: int = 0, warmup_steps: int = 120, right_share: float = 0.25) -> Path:
    """Make model and tokenizer under ``folder`` unless they are there."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import AutoTokenizer

    from atlaslib.models.tiny import tiny_llama
    from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer

    torch.set_num_threads(1)
    partial = folder.with_name(folder.name + ".partial")
    tokenizer = AutoTokenizer.from_pretrained(str(make_tiny_tokenizer(partial)))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(partial))
    model = tiny_llama(len(tokenizer), hidden=128, layers=2, max_len=128, seed=seed, tie_embeddings=True)
    loss = warm_up(model, tokenizer, steps=warmup_steps, seed=seed, right_share=right_share)
    model.save_pretrained(str(partial))
    (partial / "warmup.json").write_text(json.dumps({"steps": warmup_steps, "seed": seed, "loss": loss}))
    os.replace(partial, folder)
    return folder


def warm_up(
    model: Any, tokenizer: Any, *, steps: int, seed: int, right_share: float, learning_rate: float = 3e-3
) -> float:
    """Show the model answers of which ``right_share`` are right; returns the last loss."""
    import torch

    rng = random.Random(seed)
    prompts, _ = split_prompts(NUM_LETTERS, MAX_COUNT, HELD_OUT_SHARE, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
    value = 0.0
    for step in range(steps):
        rows = []
        for _ in range(64):
            prompt = rng.choice(prompts)
            is_right = rng.random() < right_share
            answer = answer_to(
                prompt if is_right else f"{rng.choice(LETTERS[:NUM_LETTERS])}{rng.randint(1, MAX_COUNT)}"
            )
            question, reply = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt + ">", answer))
            rows.append((question, [*reply, tokenizer.eos_token_id]))
        length = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.tensor([[*p, *a, *[tokenizer.pad_token_id] * (length - len(p) - len(a))] for p, a in rows])
        wanted = torch.tensor([[0] * len(p) + [1] * len(a) + [0] * (length - len(p) - len(a)) for p, a in rows])[:, 1:]
        logprobs = (
            model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long()).logits[:, :-1].log_softmax(-1)
        )
        chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
        loss = -(chosen * wanted).sum() / wanted.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 10)
        optimizer.step()
        value = float(loss.detach())
    return value
