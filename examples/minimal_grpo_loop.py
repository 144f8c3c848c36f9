"""The whole idea in one flat file: a language model is rewarded for what it writes, and writes better.

The task: for ``D3`` write ``DDD`` and stop. One loop, four stops: sample groups of answers, score them, compare every answer with its
group, make the better ones likelier. No classes, no framework: everything the library does beside this is speed, safety and scale.

    python examples/minimal_grpo_loop.py               about a minute on one core
    python examples/minimal_grpo_loop.py --steps 5
"""

from __future__ import annotations

import argparse
import random
import time

import torch

from atlaslib.models.tiny import tiny_llama
from atroposlib.envs.quickstart_task import LETTERS, answer_to, score_answer, split_prompts
from atroposlib.testing.tiny_tokenizer import build_tiny_tokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--warmup-steps", type=int, default=120)
parser.add_argument("--prompts", type=int, default=16, help="prompts per step")
parser.add_argument("--group", type=int, default=16, help="answers per prompt")
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--clip", type=float, default=0.2)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

torch.set_num_threads(1)  # one thread is faster than two for a model this small
torch.manual_seed(options.seed)
rng = random.Random(options.seed)
tokenizer = build_tiny_tokenizer()
END, PAD, LONGEST = tokenizer.eos_token_id, tokenizer.pad_token_id, 8
model = tiny_llama(len(tokenizer), hidden=128, layers=2, max_len=128, seed=options.seed, tie_embeddings=True)
train, held_out = split_prompts(12, 5, 0.2, options.seed)
print(
    f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {len(train)} prompts to train on, {len(held_out)} held out"
)


def encode(text: str) -> list[int]:
    """Text to token ids."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def padded(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of (prompt, answer) as ids [B, L] and the mask of what is trained, the answers [B, L]."""
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = [[*p, *a, *[PAD] * (length - len(p) - len(a))] for p, a in rows]
    mask = [[0.0] * len(p) + [1.0] * len(a) + [0.0] * (length - len(p) - len(a)) for p, a in rows]
    return torch.tensor(ids), torch.tensor(mask)


def token_logprobs(ids: torch.Tensor) -> torch.Tensor:
    """Log-prob of every token given those before it: [B, L], 0 for the first."""
    logits = model(input_ids=ids, attention_mask=(ids != PAD).long()).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0))


@torch.no_grad()
def sample(prompts: list[list[int]]) -> list[list[int]]:
    """One answer to each prompt (all of the same length), sampled at temperature 1."""
    ids = torch.tensor(prompts)
    reply = model(input_ids=ids, use_cache=True)
    tokens: list[torch.Tensor] = []
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(LONGEST):
        token = torch.multinomial(reply.logits[:, -1].softmax(-1), 1)[:, 0].masked_fill(ended, PAD)
        tokens.append(token)
        ended |= token == END
        if ended.all():
            break
        reply = model(input_ids=token[:, None], past_key_values=reply.past_key_values, use_cache=True)
    rows = torch.stack(tokens, 1).tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


def reward(prompt: str, answer: list[int]) -> float:
    """What an answer is worth, between 0 and 1."""
    stopped = bool(answer) and answer[-1] == END
    text = tokenizer.decode(answer[:-1] if stopped else answer)
    return sum(score_answer(prompt, text, stopped=stopped).values())


def apply(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# What pretraining is to a real model: it knows the form of an answer, and is right one time in four. Held-out prompts do not occur.
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, betas=(0.9, 0.95))
for _ in range(options.warmup_steps):
    rows = []
    for _ in range(64):
        prompt = rng.choice(train)
        shown = prompt if rng.random() < 0.25 else f"{rng.choice(LETTERS[:12])}{rng.randint(1, 5)}"
        rows.append((encode(prompt + ">"), [*encode(answer_to(shown)), END]))
    ids, mask = padded(rows)
    apply(-(token_logprobs(ids) * mask).sum() / mask.sum(), optimizer)

optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
started = time.time()
for step in range(1, options.steps + 1):
    # 1. A group of answers to each of a few prompts.
    prompts = [rng.choice(train) for _ in range(options.prompts)]
    asked = [prompt for prompt in prompts for _ in range(options.group)]
    encoded = [encode(prompt + ">") for prompt in asked]
    answers = sample(encoded)

    # 2. Scores.
    rewards = torch.tensor([reward(prompt, answer) for prompt, answer in zip(asked, answers, strict=True)])

    # 3. How much better an answer is than its group: the advantage of every one of its tokens.
    groups = rewards.view(options.prompts, options.group)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()

    # 4. Make better answers likelier, as far as the clip lets one step go.
    ids, mask = padded(list(zip(encoded, answers, strict=True)))
    logprobs = token_logprobs(ids)
    ratio = (logprobs - logprobs.detach()).exp()  # on policy: 1 now, its gradient is what counts
    clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
    gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    apply(-(gain * mask).sum() / mask.sum(), optimizer)

    if step % 10 == 0 or step == options.steps:
        tests = sample([encode(prompt + ">") for prompt in held_out * 4])
        scores = [reward(prompt, answer) for prompt, answer in zip(held_out * 4, tests, strict=True)]
        exact = sum(score == 1.0 for score in scores) / len(scores)
        print(
            f"step {step:3d}  {time.time() - started:5.1f} s  reward {rewards.mean():.3f}  held-out exactly right {exact:.2f}",
            flush=True,
        )
