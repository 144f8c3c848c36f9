"""The GPU part of benchmarks/trainer.py: a Qwen2-0.5B shape with random weights on one GPU.

``update``  one policy update on 32 samples of 512 tokens (128 prompt + 384 completion, groups of 8): forward, backward, clipping, AdamW.
            Tokens per second count 32 x 512 tokens per update, whatever the layout. Ours in two layouts, with and without compiled layers,
            beside a plain transformers update (full logits, cross-entropy) on the same tokens, as it is and with its layers compiled. Before
            the timing, the gradient of each variant, and of the plain policy loss on whole logits, is compared with that of a float32 copy.
``step``    whole GRPO steps of GRPOTrainer with the embedded engine: 64 completions of 256 tokens on 8 prompts of 64.
``exact_step``  the same with ``exact=True``.
``memory``  peak memory of forward and backward of one 8192-token sequence with the 152k vocabulary: chunked head and whole logits.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch


def qwen2_half_billion(max_len: int = 8192) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=max_len,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Qwen2ForCausalLM(config).to(torch.bfloat16)


def samples(count: int, prompt: int, completion: int, group: int) -> list[Any]:
    from atlaslib.types import TrainingSample

    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        if number % group == 0:
            prompt_ids = torch.randint(10, 150000, (prompt,), generator=generator).tolist()
        ids = prompt_ids + torch.randint(10, 150000, (completion,), generator=generator).tolist()
        total = prompt + completion
        made.append(
            TrainingSample(
                token_ids=ids,
                loss_mask=[False] * prompt + [True] * completion,
                sampler_logprobs=[-11.9] * total,
                advantages=[(-1.0) ** number] * total,
                reward=0.0,
                group_id=str(number // group),
            )
        )
    return made


def measure(function: Any, warm_up: int = 3, repeats: int = 8) -> float:
    for _ in range(warm_up):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def plain_policy_loss(model: Any, data: list[Any]) -> None:
    """Gradient of the clipped policy loss from whole logits, four samples at a time."""
    for start in range(0, len(data), 4):
        part = data[start : start + 4]
        ids = torch.tensor([sample.token_ids for sample in part], device="cuda")
        mask = torch.tensor([sample.loss_mask for sample in part], device="cuda")[:, 1:]
        advantages = torch.tensor([sample.advantages for sample in part], device="cuda")[:, 1:]
        old = torch.tensor([sample.sampler_logprobs for sample in part], device="cuda")[:, 1:]
        log_p = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float(), dim=-1)
        ratio = torch.exp(log_p.gather(2, ids[:, 1:, None])[..., 0] - old)
        objective = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        ((objective * mask).sum(1) / mask.sum(1)).sum().div(len(data)).backward()


def take_gradient(model: Any) -> list[torch.Tensor]:
    taken = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return taken


def distance(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """|got - wanted| / |wanted| over all parameters."""
    apart = sum(float((a.float() - b).square().sum()) for a, b in zip(got, wanted, strict=True))
    return (apart / sum(float(b.square().sum()) for b in wanted)) ** 0.5


def update_variants(model: Any, data: list[Any]) -> dict[str, Any]:
    """Name to a function that runs forward and backward."""
    from accelerate import Accelerator

    from atlaslib.trainers.grpo_config import GRPOConfig
    from atlaslib.trainers.step_metrics import StepMetrics
    from atlaslib.trainers.update import PolicyUpdate

    metrics = StepMetrics()
    variants: dict[str, Any] = {}
    for packing in ("padded", "shared_prefix"):
        for compiled in (False, True):
            config = GRPOConfig(
                output_dir=tempfile.mkdtemp(),
                beta=0.0,
                packing=packing,
                compile_modules=compiled,
                report_to="none",
                temperature=1.0,
            )
            update = PolicyUpdate(
                accelerator=Accelerator(), config=config, reference=None, pad_id=0, metrics=lambda: metrics
            )
            (pieces,) = update.micro_steps(data, 1, model)

            def backward(update: Any = update, pieces: Any = pieces) -> None:
                for piece in pieces:
                    update.loss(model, piece).loss.backward()

            variants[f"ours_{packing}{'_compiled' if compiled else ''}"] = backward
    return variants


def gradient_errors(model: Any, data: list[Any], variants: dict[str, Any]) -> dict[str, float]:
    """Relative distance of each gradient from that of a float32 copy of the model."""
    exact = copy.deepcopy(model).float()
    torch.backends.cuda.matmul.allow_tf32 = False
    plain_policy_loss(exact, data)
    torch.backends.cuda.matmul.allow_tf32 = True
    wanted = take_gradient(exact)
    del exact
    errors = {}
    for name, backward in {"plain_policy_loss": lambda: plain_policy_loss(model, data), **variants}.items():
        backward()
        errors[f"{name}_gradient_error"] = distance(take_gradient(model), wanted)
    torch.cuda.empty_cache()
    return errors


def update_rate() -> dict[str, Any]:
    model = qwen2_half_billion()
    model.train()
    data = samples(32, 128, 384, 8)
    tokens = 32 * 512
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, fused=True)
    variants = update_variants(model, data)
    results: dict[str, Any] = {"part": "update", "tokens": tokens, **gradient_errors(model, data, variants)}

    def finish() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    ids = torch.tensor([sample.token_ids for sample in data], device="cuda")

    def plain() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        finish()

    torch.cuda.reset_peak_memory_stats()
    results["plain_transformers_tokens_per_s"] = tokens / measure(plain)
    results["plain_transformers_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    for name, backward in variants.items():

        def ours(backward: Any = backward) -> None:
            backward()
            finish()

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        results[f"{name}_tokens_per_s"] = tokens / measure(ours)
        results[f"{name}_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    for layer in model.model.layers:  # last, because it stays
        layer.compile()
    results["plain_transformers_compiled_tokens_per_s"] = tokens / measure(plain)
    return results


def whole_step(*, exact: bool = False) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from atlaslib.trainers import GRPOConfig, GRPOTrainer
    from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer

    with tempfile.TemporaryDirectory() as name:
        tokenizer = AutoTokenizer.from_pretrained(str(make_tiny_tokenizer(Path(name) / "tokenizer")))
        rows = [{"prompt": f"{number:04d} " + "abcdefgh " * 7} for number in range(64)]
        config = GRPOConfig(
            output_dir=name,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=256,
            min_completion_length=256,
            max_steps=8,
            beta=0.0,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1000,
            exact=exact,
        )

        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            return [float(sum(ids) % 97) for ids in completion_ids]

        trainer = GRPOTrainer(qwen2_half_billion(2048), reward, config, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        lines = [json.loads(line) for line in (Path(name) / "metrics.jsonl").read_text().splitlines()][3:]
    names = [name for name in lines[0] if name.startswith("time/")]
    names += ["train/num_tokens", "train/tokens_per_s", "policy/mismatch_abs", "policy/ratio_mean"]
    medians = {key: statistics.median(line[key] for line in lines) for key in names}
    medians["sampled_tokens_per_s"] = 64 * 256 / medians["time/sampling_s"]
    return {"part": "exact_step" if exact else "step", **medians}


def peak_memory() -> dict[str, Any]:
    from accelerate import Accelerator

    from atlaslib.trainers.grpo_config import GRPOConfig
    from atlaslib.trainers.step_metrics import StepMetrics
    from atlaslib.trainers.update import PolicyUpdate

    model = qwen2_half_billion(8192)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    data = samples(1, 16, 8176, 1)
    results: dict[str, Any] = {"part": "memory", "tokens": 8192, "weights_gib": torch.cuda.memory_allocated() / 2**30}
    metrics = StepMetrics()
    for chunk in (1024, None):
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            beta=0.0,
            packing="padded",
            logprob_chunk_size=chunk,
            report_to="none",
            temperature=1.0,
        )
        update = PolicyUpdate(
            accelerator=Accelerator(), config=config, reference=None, pad_id=0, metrics=lambda: metrics
        )
        (pieces,) = update.micro_steps(data, 1, model)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        update.loss(model, pieces[0]).loss.backward()
        results[f"ours_chunk_{chunk}_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        model.zero_grad(set_to_none=True)
    ids = torch.tensor([data[0].token_ids], device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model(input_ids=ids, labels=ids).loss.backward()
    results["whole_logits_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return results


def run_cuda(name: str) -> dict[str, Any]:
    """One part of the benchmark."""
    torch.backends.cuda.matmul.allow_tf32 = True
    result = {
        "update": update_rate,
        "step": whole_step,
        "exact_step": partial(whole_step, exact=True),
        "memory": peak_memory,
    }[name]()
    torch.cuda.empty_cache()
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **result}
