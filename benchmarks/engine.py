"""How fast the embedded engine samples, beside transformers' own ways, in one run on one machine.

    python benchmarks/engine.py --device cpu                       # SmolLM2-135M, float32
    python benchmarks/engine.py --device cuda --shape 0.5b         # Qwen2 shape, random bfloat16 weights
    python benchmarks/engine.py --device cuda --shape 7b --loads 256 --peers none

Inside the measured region: everything from the prompts' token ids to completions with log-probs (queueing, prefill,
decode, sampling, copy to the host). Outside: loading weights, engine start (reported apart), one short warm-up run.
Every row is one run; `floor` is the time the weights and keys of each step need at the measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {"num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936},
    "7b": {"num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
}  # fmt: skip


@dataclass
class Row:
    what: str
    load: str
    tokens: int
    seconds: float
    note: str = ""
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Load:
    """Prompts and the number of new tokens of each."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]
    slots: int
    group: int = 1  # samples of every prompt; the lists above hold one entry per prompt


def random_prompts(count: int, low: int, high: int, vocab: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def cuda_load(name: str, vocab: int, mixed_slots: int) -> Load:
    if name == "mixed":  # three times as many requests as slots; the same mean lengths as the uniform load
        count = 3 * mixed_slots
        new = torch.randint(32, 481, (count,), generator=torch.Generator().manual_seed(1)).tolist()
        return Load(f"mixed x{count}", random_prompts(count, 32, 224, vocab, 2), new, mixed_slots)
    if name.endswith("g"):  # groups of eight samples of one prompt, as a trainer asks
        count = int(name[:-1])
        return Load(
            f"{count} x 256, by 8", random_prompts(count // 8, 128, 128, vocab, 4), [256] * (count // 8), count, 8
        )
    count = int(name)
    return Load(f"{count} x 256", random_prompts(count, 128, 128, vocab, 3), [256] * count, count)


def timed(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def run_engine(engine: Any, load: Load, device: str) -> tuple[Row, list[Any]]:
    from atlaslib.engine import SamplingParams

    params = [SamplingParams(n=load.group, max_tokens=count, ignore_eos=True, seed=1) for count in load.new_tokens]
    seconds, replies = timed(lambda: engine.generate(load.prompts, params), device)
    tokens = sum(len(reply.token_ids) for group in replies for reply in group)
    return Row("atropos engine", load.name, tokens, seconds), replies


def run_transformers(model: Any, load: Load, device: str, **how: Any) -> Row:
    """transformers.generate on the left-padded batch; a mixed load runs in batches of `slots` to the longest reply."""
    seconds = 0.0
    for start in range(0, len(load.prompts), load.slots):
        prompts, new = load.prompts[start : start + load.slots], max(load.new_tokens[start : start + load.slots])
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        kwargs = {
            "do_sample": True,
            "top_k": 0,
            "top_p": 1.0,
            "max_new_tokens": new,
            "min_new_tokens": new,
            "pad_token_id": 0,
            **how,
        }
        batch = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        seconds += timed(lambda: model.generate(**batch, **kwargs), device)[0]  # noqa: B023
    name = "transformers.generate" + (" static + compile" if how else "")
    return Row(name, load.name, sum(load.new_tokens), seconds)


def run_continuous_batching(model: Any, load: Load, device: str) -> Row:
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=max(load.new_tokens), do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    seconds, out = timed(
        lambda: model.generate_batch(inputs=load.prompts, generation_config=config, progress_bar=False), device
    )
    tokens = sum(len(output.generated_tokens) for output in out.values())
    return Row("transformers continuous batching", load.name, tokens, seconds)


def mismatch(model: Any, load: Load, replies: list[Any], device: str, count: int = 16) -> dict[str, float]:
    """|log-prob of the engine - log-prob of the model's plain forward| over some of the replies."""
    differences: list[torch.Tensor] = []
    for prompt, group in list(zip(load.prompts, replies, strict=True))[:count]:
        for reply in group[:1]:
            whole = prompt + reply.token_ids
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([whole], device=device)).logits[0, len(prompt) - 1 : -1].float()
            expected = torch.log_softmax(logits.double(), -1)  # in float32 the softmax itself is off by 2e-5 on CPU
            chosen = torch.tensor(reply.token_ids, device=device)[:, None]
            differences.append((expected.gather(1, chosen)[:, 0].cpu() - torch.tensor(reply.raw_logprobs)).abs())
    every = torch.cat(differences)
    return {"max_abs_dlogprob": float(every.max()), "mean_abs_dlogprob": float(every.mean())}


def prefill_share(engine: Any, load: Load, row: Row) -> dict[str, float]:
    """Seconds the prompts alone take, and the rate of the rest of the run."""
    from atlaslib.engine import SamplingParams

    engine.blocks.forget_all()
    params = SamplingParams(n=load.group, max_tokens=1, ignore_eos=True)
    seconds, _ = timed(lambda: engine.generate(load.prompts, params), "cuda")
    return {"prefill_s": seconds, "decode_tok_s": row.tokens / (row.seconds - seconds)}


def copy_bandwidth() -> float:
    """Bytes per second of a large device copy, read plus written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    seconds, _ = timed(lambda: [target.copy_(source) for _ in range(10)], "cuda")
    return 20 * source.numel() / seconds


def decode_floor(model: Any, engine: Any, load: Load, bandwidth: float) -> float:
    """Seconds the weights and keys of the decode steps of a uniform load need at `bandwidth`."""
    from atlaslib.engine.memory import bytes_per_token

    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight.data_ptr() == embedding.data_ptr()
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) - (
        0 if tied else embedding.numel() * embedding.element_size()
    )
    steps = max(load.new_tokens)
    context = load.group * sum(len(prompt) + new / 2 for prompt, new in zip(load.prompts, load.new_tokens, strict=True))
    return steps * (weights + context * bytes_per_token(engine.runner.layers)) / bandwidth


def bench_cuda(args: argparse.Namespace) -> list[Row]:
    from transformers import AutoModelForCausalLM, Qwen2Config

    from atlaslib.engine import Engine, EngineConfig, SamplingParams

    config = Qwen2Config(**SHAPES[args.shape], max_position_embeddings=1024, bos_token_id=None, eos_token_id=2)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    bandwidth = copy_bandwidth()
    rows: list[Row] = []
    loads = [cuda_load(name, config.vocab_size, args.mixed_slots) for name in args.loads.split(",")]
    for load in loads:
        start = time.perf_counter()
        engine = Engine(model, config=EngineConfig(max_num_seqs=load.slots, max_model_len=1024))
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
        first_token = time.perf_counter() - start
        engine.generate(
            random_prompts(load.slots, 100, 160, config.vocab_size, 9), SamplingParams(max_tokens=4, ignore_eos=True)
        )
        row, replies = run_engine(engine, load, "cuda")
        row.extra = {"start_to_first_token_s": first_token, **mismatch(model, load, replies, "cuda")}
        row.extra |= prefill_share(engine, load, row)
        if not load.name.startswith("mixed"):
            row.extra["floor_s"] = decode_floor(model, engine, load, bandwidth)
        rows.append(row)
        show(row)
        del engine, replies
        torch.cuda.empty_cache()
        if args.peers != "none" and load.group == 1:
            rows += peers(model, load, args)
    return rows


def peers(model: Any, load: Load, args: argparse.Namespace) -> list[Row]:
    """transformers' ways on the same load, with fewer new tokens where a full run would take minutes."""
    short = Load(load.name, load.prompts[:], [min(count, args.peer_tokens) for count in load.new_tokens], load.slots)
    runs: list[Callable[[], Row]] = [lambda: run_transformers(model, short, "cuda")]
    if not load.name.startswith("mixed"):
        runs.append(lambda: run_continuous_batching(model, short, "cuda"))
        if "compile" in args.peers:
            runs.append(lambda: _warm_compile(model, short))
    rows = []
    for run in runs:
        try:
            row = run()
        except Exception as error:  # a peer that cannot run is a row of the table, not the end of the benchmark
            print(f"  peer failed: {type(error).__name__}: {str(error)[:200]}")
            continue
        row.note = (
            f"{short.new_tokens[0]} new tokens"
            if not load.name.startswith("mixed")
            else f"replies cut at {args.peer_tokens}"
        )
        rows.append(row)
        show(row)
        torch.cuda.empty_cache()
    return rows


def _warm_compile(model: Any, load: Load) -> Row:
    start = time.perf_counter()
    run_transformers(model, load, "cuda", cache_implementation="static")
    warm = time.perf_counter() - start
    row = run_transformers(model, load, "cuda", cache_implementation="static")
    row.extra["first_run_s"] = warm
    return row


def bench_cpu(args: argparse.Namespace) -> list[Row]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from atlaslib.engine import Engine, EngineConfig
    from atlaslib.models.smollm2 import smollm2_folder

    torch.set_num_threads(args.threads)
    folder = str(smollm2_folder())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = [
        "What is the capital of France?",
        "Write a haiku about rain.",
        "Explain why the sky is blue.",
        "What is 17 + 25?",
    ]
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in questions
    ]
    prompts = [chats[i // 8] for i in range(32)]  # four groups of eight, as a trainer asks
    mixed = torch.randint(8, 121, (32,), generator=torch.Generator().manual_seed(1)).tolist()
    uniform = Load(f"32 x {args.cpu_tokens}", prompts, [args.cpu_tokens] * 32, 32)
    lengths = [length * args.cpu_tokens // 64 for length in mixed]
    loads = [uniform, Load(f"32 x {min(lengths)}..{max(lengths)}", prompts, lengths, 32)]
    settings = {"max_model_len": 512, "num_threads": args.threads, "check_model": False}
    rows: list[Row] = []

    def note(run: Callable[[], Row], name: str = "") -> None:
        start = time.process_time()
        row = run()
        row.what += name
        row.extra["tok_per_cpu_s"] = row.tokens / (
            time.process_time() - start
        )  # fair on a machine that does other things too
        rows.append(row)
        show(row)

    for load in loads:
        engine = Engine(model, tokenizer, EngineConfig(**settings))
        kept: list[Any] = []
        note(lambda: _keep(run_engine(engine, load, "cpu"), kept))  # noqa: B023
        print("  ", mismatch(model, load, kept, "cpu", count=4))
        note(lambda: run_transformers(model, load, "cpu"))  # noqa: B023
        if args.exact and load is uniform:
            exact = Engine(model, tokenizer, EngineConfig(**settings, exact=True))
            note(lambda: run_engine(exact, load, "cpu")[0], " exact")  # noqa: B023
    return rows


def _keep(result: tuple[Row, list[Any]], kept: list[Any]) -> Row:
    kept += result[1]
    return result[0]


def show(row: Row) -> None:
    extra = "  ".join(f"{name}={value:.3g}" for name, value in row.extra.items())
    print(
        f"{row.what:36s} {row.load:18s} {row.rate:10.1f} tok/s  {row.seconds:8.2f} s  {row.note}  {extra}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--loads", default="64,256,256g,1024,mixed")
    parser.add_argument("--mixed-slots", type=int, default=256)
    parser.add_argument("--peers", choices=("none", "plain", "compile"), default="plain")
    parser.add_argument("--peer-tokens", type=int, default=32)
    parser.add_argument("--cpu-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--exact", action="store_true", help="CPU: also run exact mode")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    rows = bench_cuda(args) if args.device == "cuda" else bench_cpu(args)
    if args.json:
        args.json.write_text(json.dumps([{**asdict(row), "rate": row.rate} for row in rows], indent=1))


if __name__ == "__main__":
    main()
