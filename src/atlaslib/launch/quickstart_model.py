"""The quickstart's model: a Llama of 0.4M parameters made on the spot, and its few seconds of warm-up.

The warm-up is supervised and teaches the *form* of an answer only: a random letter, a random number of times, then stop.
The letter and the number have nothing to do with the prompt, so everything about the task is left to reinforcement
learning. It saves the minutes a random model would spend finding out that most of its 259 tokens are never right.
"""

from __future__ import annotations

import json
import logging
import os
import random
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|im_end|>' }}{% else %}{{ '>' }}{% endif %}{% endfor %}"
)
"""A prompt is its text and ``>``: every token of a long template would be one more to learn to look past."""


def build_quickstart_model(
    folder: Path, *, seed: int = 0, warmup_steps: int = 50, num_letters: int = 12, max_count: int = 5
) -> Path:
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
    loss = warm_up(model, tokenizer, steps=warmup_steps, seed=seed, num_letters=num_letters, max_count=max_count)
    model.save_pretrained(str(partial))
    (partial / "warmup.json").write_text(json.dumps({"steps": warmup_steps, "seed": seed, "loss": loss}))
    os.replace(partial, folder)
    return folder


def warm_up(
    model: Any, tokenizer: Any, *, steps: int, seed: int, num_letters: int, max_count: int, learning_rate: float = 3e-3
) -> float:
    """Show the model answers of the right form and random content; returns the last loss."""
    import torch

    rng = random.Random(seed)
    letters = [chr(ord("A") + index) for index in range(num_letters)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
    value = 0.0
    for step in range(steps):
        rows = []
        for _ in range(64):
            prompt = tokenizer.encode(f"{rng.choice(letters)}{rng.randint(1, max_count)}>", add_special_tokens=False)
            answer = tokenizer.encode(rng.choice(letters) * rng.randint(1, max_count), add_special_tokens=False)
            rows.append((prompt, [*answer, tokenizer.eos_token_id]))
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
