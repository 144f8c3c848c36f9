"""`atropos run CONFIG.yaml`: start everything one file names, and watch over it."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path


def main(argv: list[str]) -> int:
    """Exit codes: 0 finished, 1 a process could not be kept alive, 2 wrong configuration, 130 stopped."""
    parser = argparse.ArgumentParser(
        prog="atropos run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="YAML file: model, trainer, environments (see atlaslib.launch.plan)")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="dotted keys, for instance trainer.max_steps=50 environments.0.weight=2",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved plan, check that everything exists, start nothing"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="empty the run's folder first instead of going on from its checkpoint"
    )
    parser.add_argument("--plain", action="store_true", help="lines instead of a panel that refreshes")
    options = parser.parse_intermixed_args(argv)
    logging.basicConfig(level=logging.ERROR)

    from atlaslib.launch.plan import check_plan, describe, load_plan
    from atlaslib.launch.running import finished_step, run_plan

    plan = load_plan(options.config, options.overrides)
    check_plan(plan, where=str(options.config))
    if options.dry_run:
        print(describe(plan))
        return 0
    done = None if options.fresh else finished_step(plan.run_dir)
    if done is not None and done >= int(plan.trainer.get("max_steps", 100)):
        print(
            f"{plan.run_dir} has finished at step {done}; give --fresh to start anew or a larger trainer.max_steps to go on"
        )
        return 0
    return run_plan(plan, title=plan.name, live=False if options.plain else None, fresh=options.fresh)
