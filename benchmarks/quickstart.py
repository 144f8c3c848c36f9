"""Does the quickstart learn, how reliably, and how soon?

Runs `atropos quickstart` in a process of its own, once per seed, and reads its run log. Measured, from the start of the command:
seconds to the first optimizer step, to the end of the run; reward of the first and of the last twentieth of the steps; share of sampled
answers to held-out prompts that are exactly right, first and last evaluation.

    python benchmarks/quickstart.py --seeds 10          the table of the docs
    python benchmarks/quickstart.py --quick             one seed, 12 steps
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


def measure(seed: int, steps: int, folder: Path, extra: list[str]) -> dict[str, float]:
    """One quickstart."""
    run_dir = folder / f"seed{seed}"
    started = time.time()
    command = [sys.executable, "-m", "atroposlib.cli.main", "quickstart", "--plain", "--fresh", "--seed", str(seed)]
    command += ["--steps", str(steps), "--run-dir", str(run_dir), *extra]
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
    part = max(1, len(rewards) // 20)
    values = [value for _, value in rewards]
    above = [when - started for when, value in rewards if value >= 0.8]
    return {
        "seed": seed,
        "exit_code": code,
        "first_step_s": rewards[0][0] - started,
        "reward_0.8_s": above[0] if above else float("nan"),
        "total_s": total,
        "reward_start": sum(values[:part]) / part,
        "reward_end": sum(values[-part:]) / part,
        "held_out_first": exact[0] if exact else float("nan"),
        "held_out_last": exact[-1] if exact else float("nan"),
    }


def main() -> int:
    """Print the table; exit code 1 when fewer than nine in ten rise to 0.8."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--quick", action="store_true", help="one seed, 12 steps, no verdict")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("extra", nargs="*", help="further arguments for atropos quickstart")
    options = parser.parse_args()
    seeds, steps = (1, 12) if options.quick else (options.seeds, options.steps)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {steps} steps, {seeds} seed(s)"
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
    risen = sum(row["reward_end"] >= 0.8 and row["reward_end"] > row["reward_start"] + 0.3 for row in rows)
    print(f"{risen} of {len(rows)} rose to at least 0.8")
    return 0 if options.quick or risen >= 0.9 * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
