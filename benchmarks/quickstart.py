"""Does the quickstart learn, how reliably, and how soon?

Runs `atropos quickstart` in a process of its own, once per seed, and reads its run log. Measured, from the start of the command:
seconds to the first optimizer step, to the end of the run; reward of the first and of the last steps (a twentieth of them, at least three); share
of the answers to held-out prompts that are exactly right, first and last evaluation. With a real language model, too: the share
of held-out sums answered rightly (greedily) by the model as it came and by the trained one.

    python benchmarks/quickstart.py --seeds 10                          the table of the docs
    python benchmarks/quickstart.py --seeds 3 -- --model smollm2        the same for SmolLM2-135M
    python benchmarks/quickstart.py --quick                             one seed, 12 steps
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from atroposlib.api.run_log import read_run_log
from atroposlib.envs.quickstart_task import score_sum, split_sums, sum_question


def measure(seed: int, steps: int | None, folder: Path, extra: list[str]) -> dict[str, float]:
    """One quickstart."""
    run_dir = folder / f"seed{seed}"
    started = time.time()
    command = [sys.executable, "-m", "atroposlib.cli.main", "quickstart", "--plain", "--fresh", "--seed", str(seed)]
    command += ["--run-dir", str(run_dir), *extra] + (["--steps", str(steps)] if steps else [])
    with (folder / f"seed{seed}.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    total = time.time() - started
    log_file = read_run_log(run_dir)
    try:
        rewards = [
            tuple(row)
            for row in log_file.execute(
                "SELECT time, value FROM metrics WHERE source='trainer' AND name='reward' ORDER BY step, id"
            )
        ]
        exact = [
            row[0] for row in log_file.execute("SELECT value FROM metrics WHERE name='eval/held_out_exact' ORDER BY id")
        ]
    finally:
        log_file.close()
    part = min(len(rewards), max(3, len(rewards) // 20))
    values = [value for _, value in rewards]
    above = [when - started for when, value in rewards if value >= 0.8]
    row = {
        "seed": seed,
        "exit_code": code,
        "first_step_s": rewards[0][0] - started,
        "reward_0.8_s": above[0] if above else float("nan"),
        "total_s": total,
        "step_s": (rewards[-1][0] - rewards[0][0]) / max(1, len(rewards) - 1),
        "reward_start": sum(values[:part]) / part,
        "reward_end": sum(values[-part:]) / part,
        "held_out_first": exact[0] if exact else float("nan"),
        "held_out_last": exact[-1] if exact else float("nan"),
    }
    if "smollm2" in extra:
        row |= {
            "greedy_before": greedy_sums(run_dir / "model", seed),
            "greedy_after": greedy_sums(run_dir / "final_model", seed),
        }
    return row


def greedy_sums(folder: Path, seed: int) -> float:
    """Share of the held-out sums a model answers rightly, without sampling."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from atlaslib.engine import Engine, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    engine = Engine(AutoModelForCausalLM.from_pretrained(str(folder)), tokenizer)
    pairs = split_sums(seed)[1]
    chats = [[{"role": "user", "content": sum_question(pair)}] for pair in pairs]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    answers = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=10))
    right = [score_sum(pair, tokenizer.decode(found[0].token_ids)) for pair, found in zip(pairs, answers, strict=True)]
    return sum(right) / len(right)


def main() -> int:
    """Print the table; exit code 1 when fewer than nine in ten rise to 0.8."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=None, help="default: that of the quickstart")
    parser.add_argument("--quick", action="store_true", help="one seed, 12 steps, no verdict")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("extra", nargs="*", help="further arguments for atropos quickstart")
    options = parser.parse_args()
    seeds, steps = (1, 12) if options.quick else (options.seeds, options.steps)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {steps or 'default'} steps, {seeds} seed(s)"
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="atropos-quickstart-") as folder:
        for seed in range(options.first_seed, options.first_seed + seeds):
            rows.append(measure(seed, steps, Path(folder), options.extra))
            if seed == options.first_seed:
                print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
            print(
                "| "
                + " | ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in rows[-1].values())
                + " |",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    wanted = 0.6 if "smollm2" in options.extra else 0.8
    risen = sum(row["reward_end"] >= wanted and row["reward_end"] > row["reward_start"] + 0.3 for row in rows)
    print(f"{risen} of {len(rows)} rose to at least {wanted}")
    return 0 if options.quick or risen >= 0.9 * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
