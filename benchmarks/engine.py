"""How fast the embedded engine samples, beside transformers' own ways, in one run on one machine.

    python benchmarks/engine.py --device cpu                       # SmolLM2-135M, float32
    python benchmarks/engine.py --device cuda --peers all          # Qwen2 shapes of 0.5B and 7B, random bfloat16 weights
    python benchmarks/engine.py --device cuda --shapes 7b --loads 256,256g

Inside the measured region: everything from the prompts' token ids to completions with log-probs (queueing, prefill,
decode, sampling, copy to the host). Outside: loading weights, engine start (reported apart), one short warm-up run.
Every row is one run. `floor` is the time the weights and keys of the decode steps need at the measured copy bandwidth, `bound`
that of the whole run when its products also take the time of their arithmetic at the measured rate.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from engine_peers import Load, Row, run_generate, run_peers, timed

SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {"num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936},
    "7b": {"num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
}  # fmt: skip


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


def run_engine(engine: Any, load: Load, device: str) -> tuple[Row, list[Any]]:
    """The load through the engine; also the rate until its queue was empty, when there was a queue."""
    from atlaslib.engine import SamplingParams

    params = [SamplingParams(n=load.group, max_tokens=count, ignore_eos=True, seed=1) for count in load.new_tokens]
    queue_empty: list[tuple[float, int]] = []
    step, start, before = engine.step, time.perf_counter(), engine.num_tokens

    def watched_step() -> bool:
        went: bool = step()
        if not queue_empty and not engine.scheduler.waiting:
            queue_empty.append((time.perf_counter() - start, engine.num_tokens - before))
        return went

    engine.step = watched_step
    seconds, replies = timed(lambda: engine.generate(load.prompts, params), device)
    del engine.step
    tokens = sum(len(reply.token_ids) for group in replies for reply in group)
    row = Row("atropos engine", load.name, tokens, seconds)
    if len(load.prompts) * load.group > load.slots:
        row.extra["until_queue_empty_tok_s"] = queue_empty[0][1] / queue_empty[0][0]
    return row, replies


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


def product_rate() -> float:
    """Floating-point operations per second of large bfloat16 products, kept up for a while as a run does."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    timed(lambda: [torch.mm(a, b) for _ in range(300)], "cuda")
    seconds, _ = timed(lambda: [torch.mm(a, b) for _ in range(500)], "cuda")
    return 500 * 2 * 8192**3 / seconds


def floors(model: Any, engine: Any, load: Load, bandwidth: float, flops: float) -> dict[str, float]:
    """Seconds of the decode steps' bytes at `bandwidth`, and of the whole run at `bandwidth` and `flops`."""
    from atlaslib.engine.memory import bytes_per_token

    size = {name: p.numel() for name, p in model.named_parameters()}
    head = model.get_output_embeddings().weight.numel()
    layers = sum(count for name, count in size.items() if ".layers." in name)
    replies = load.group * sum(load.new_tokens)
    steps = max(*load.new_tokens, replies / load.slots)
    weights = steps * 2 * (layers + head) / bandwidth
    pairs = zip(load.prompts, load.new_tokens, strict=True)
    context = load.group * sum(new * (len(prompt) + new / 2) for prompt, new in pairs)
    keys = context * bytes_per_token(engine.runner.layers) / bandwidth
    prefill = 2 * layers * sum(map(len, load.prompts)) / flops
    decode = max(weights, 2 * (layers + head) * replies / flops)
    return {"floor_s": weights + keys, "bound_s": prefill + decode + keys}


def bench_cuda(args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    shapes = args.shapes.split(",")
    try:
        if len(shapes) == 1:
            bench_shape(shapes[0], args, rows)
        for shape in shapes if len(shapes) > 1 else ():
            rows += in_own_process(shape, args)
            write_json(args.json, rows)
    finally:  # also what there is when the run is cut short
        print_table(rows)
    return rows


def in_own_process(shape: str, args: argparse.Namespace) -> list[Row]:
    """The rows of one shape. In one process torch.compile would treat the sizes of the first shape's runs as variable in the second's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json" if args.json is None else args.json.with_suffix(f".{shape}.json")
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--shapes", shape, "--json", str(path)], check=True)
        return [Row(**{name: row[name] for name in row if name != "rate"}) for row in json.loads(path.read_text())]


def bench_shape(shape: str, args: argparse.Namespace, rows: list[Row]) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=1024, bos_token_id=None, eos_token_id=2)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    bandwidth, flops = copy_bandwidth(), product_rate()
    print(f"{shape}: copies at {bandwidth / 1e12:.2f} TB/s, products at {flops / 1e12:.0f} TFLOP/s", flush=True)
    loads = [cuda_load(name, config.vocab_size, args.mixed_slots) for name in args.loads.split(",")]

    def note(row: Row) -> None:
        row.shape = shape
        rows.append(row)
        show(row)
        write_json(args.json, rows)  # as they come: a run that is cut short has written what it measured

    for load in loads:
        note(bench_load(model, load, bandwidth, flops))
    if args.exact:
        note(bench_exact(model, cuda_load("256", config.vocab_size, args.mixed_slots)))
    if args.peers != "none":
        which = ["generate", "continuous", "compile"] if args.peers == "all" else args.peers.split(",")
        end = time.perf_counter() + args.peer_minutes * 60
        single = [load for load in loads if load.group == 1]
        run_peers(model, single, which, args.peer_seconds, lambda: time.perf_counter() > end, note)


def warm_up(engine: Any, load: Load) -> None:
    from atlaslib.engine import SamplingParams

    prompts = random_prompts(load.slots, 100, 160, engine.runner.vocab_size, 9)
    engine.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))


def bench_exact(model: Any, load: Load) -> Row:
    """Exact mode, and its largest difference from the trainer's exact pass over some replies."""
    from atlaslib.engine import Engine, EngineConfig
    from atlaslib.engine.exact import exact_forward, exact_token_logprobs

    engine = Engine(model, config=EngineConfig(max_num_seqs=load.slots, max_model_len=1024, exact=True))
    warm_up(engine, load)
    row, replies = run_engine(engine, load, "cuda")
    row.what += " exact"
    sequences = [prompt + group[0].token_ids for prompt, group in zip(load.prompts[:8], replies, strict=False)]
    ids = torch.tensor(sequences, device="cuda")
    start = len(load.prompts[0]) - 1
    with exact_forward(model), torch.no_grad():
        logits = model(input_ids=ids).logits[:, start:-1]
    expected = exact_token_logprobs(logits.flatten(0, 1), ids[:, start + 1 :].flatten()).view(len(sequences), -1)
    ours = torch.tensor([group[0].logprobs for group in replies[:8]])
    row.extra["max_abs_dlogprob"] = float((expected.cpu() - ours).abs().max())
    del engine, replies, logits
    torch.cuda.empty_cache()
    return row


def bench_load(model: Any, load: Load, bandwidth: float, flops: float) -> Row:
    from atlaslib.engine import Engine, EngineConfig, SamplingParams

    start = time.perf_counter()
    engine = Engine(model, config=EngineConfig(max_num_seqs=load.slots, max_model_len=1024))
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    first_token = time.perf_counter() - start
    warm_up(engine, load)
    row, replies = run_engine(engine, load, "cuda")
    row.extra |= {"start_to_first_token_s": first_token, **floors(model, engine, load, bandwidth, flops)}
    row.extra |= mismatch(model, load, replies, "cuda") | prefill_share(engine, load, row)
    del engine, replies
    torch.cuda.empty_cache()
    return row


def print_table(rows: list[Row]) -> None:
    """Rates by load and way, with the engine's multiple of each, as Markdown."""
    if not rows:
        return
    ways = list(dict.fromkeys(row.what for row in rows))
    print("\n| shape | load | floor | bound | " + " | ".join(ways) + " |\n|" + "---|" * (4 + len(ways)))
    for shape, load in dict.fromkeys((row.shape, row.load) for row in rows):
        cells = {row.what: row for row in rows if (row.shape, row.load) == (shape, load)}
        ours = cells[ways[0]]
        shares = [f"{ours.extra[name] / ours.seconds:.0%}" for name in ("floor_s", "bound_s")]
        texts = [f"{ours.rate:,.0f}"]
        for way in ways[1:]:
            row = cells.get(way)
            texts.append(f"{row.rate:,.0f} ({ours.rate / row.rate:.1f}x; {row.note})" if row else "")
        print(f"| {shape} | {load} | " + " | ".join(shares + texts) + " |")


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
        note(lambda: run_generate(model, load, "cpu"))  # noqa: B023
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


def write_json(path: Path | None, rows: list[Row]) -> None:
    if path is not None:
        path.write_text(json.dumps([{**asdict(row), "rate": row.rate} for row in rows], indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default="0.5b,7b", help=f"comma list of {', '.join(SHAPES)}")
    parser.add_argument("--loads", default="64,256,256g,1024,mixed")
    parser.add_argument("--mixed-slots", type=int, default=256)
    parser.add_argument("--peers", default="none", help="none, all, or a comma list of generate, continuous, compile")
    parser.add_argument("--peer-seconds", type=float, default=5.0, help="limit of a peer's measured run")
    parser.add_argument(
        "--peer-minutes", type=float, default=10.0, help="start no peer's run later than this, per shape"
    )
    parser.add_argument("--cpu-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--exact", action="store_true", help="also run exact mode")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    write_json(args.json, bench_cuda(args) if args.device == "cuda" else bench_cpu(args))


if __name__ == "__main__":
    main()
