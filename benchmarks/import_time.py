"""What does importing the environment base cost?

CPU seconds (user and system) of a fresh interpreter that imports ``atroposlib.envs.base``, less those of one that
imports nothing; the median of several runs. Also which heavy packages were loaded by it: there should be none.

    python benchmarks/import_time.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

HEAVY = ("torch", "openai", "wandb", "transformers", "datasets", "numpy", "aiohttp")
CODE = """
import json, resource, sys
{statement}
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([usage.ru_utime + usage.ru_stime, [name for name in {heavy!r} if name in sys.modules]]))
"""


def cost(statement: str) -> tuple[float, list[str]]:
    code = CODE.format(statement=statement, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, loaded = json.loads(done.stdout)
    return seconds, loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    empty = statistics.median(cost("")[0] for _ in range(arguments.runs))
    for module in ("atroposlib.type_definitions", "atroposlib.envs.base", "atroposlib.envs.env_cli"):
        runs = [cost(f"import {module}") for _ in range(arguments.runs)]
        seconds = statistics.median(run[0] for run in runs) - empty
        print(f"import {module:<30} {seconds:6.3f} CPU s   heavy packages: {', '.join(runs[0][1]) or 'none'}")


if __name__ == "__main__":
    main()
