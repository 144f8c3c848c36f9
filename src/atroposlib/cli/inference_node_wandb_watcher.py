"""``inference-node-wandb-watcher``: log the health of one node's inference servers to the run's wandb group."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from atroposlib.envs.server_handling.slurm import FIRST_PORT, GPUS_PER_NODE
from atroposlib.errors import MissingExtraError
from atroposlib.frontend.latest_group import fetch_json
from atroposlib.utils.closed_pipe import ends_with_its_reader

logger = logging.getLogger(__name__)


def server_ports(tensor_parallel: int) -> list[int]:
    """One server per ``tensor_parallel`` GPUs, as on every node of a Slurm job."""
    return [FIRST_PORT + index for index in range(GPUS_PER_NODE // tensor_parallel)]


def is_healthy(url: str, *, timeout_s: float = 10.0) -> bool:
    """Whether ``GET url`` answers 200."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as reply:
            return int(reply.status) == 200
    except OSError:
        return False


def health_metrics(node_num: int, ports: Sequence[int], probe: Callable[[str], bool] = is_healthy) -> dict[str, int]:
    """``server/server_health_{node}_{i}``: 1 for a server that can generate, else 0."""
    return {
        f"server/server_health_{node_num}_{index}": int(probe(f"http://localhost:{port}/health_generate"))
        for index, port in enumerate(ports)
    }


def watch(
    api_url: str,
    tensor_parallel: int,
    node_num: int,
    wandb: Any,
    *,
    sleep: Callable[[float], None] = time.sleep,
    fetch: Callable[[str], dict[str, Any]] = fetch_json,
    probe: Callable[[str], bool] = is_healthy,
    num_rounds: int | None = None,
) -> None:
    """Wait for the run's wandb group, then log the health every minute in which the step has grown."""
    ports = server_ports(tensor_parallel)
    info = _ask(fetch, f"{api_url}/wandb_info")
    while info.get("project") is None:
        sleep(1.0)
        info = _ask(fetch, f"{api_url}/wandb_info")
    wandb.init(project=info["project"], group=info["group"], name=f"inf_node_{node_num}")
    last_step, rounds = -1, 0
    while num_rounds is None or rounds < num_rounds:
        rounds += 1
        step = int(_ask(fetch, f"{api_url}/status").get("current_step", last_step))
        if step > last_step:
            wandb.log(health_metrics(node_num, ports, probe), step=step)
            last_step = step
        sleep(60.0)


def _ask(fetch: Callable[[str], dict[str, Any]], url: str) -> dict[str, Any]:
    try:
        return fetch(url)
    except (OSError, ValueError) as error:
        logger.warning("%s does not answer (%s); trying again", url, error)
        return {}


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="inference-node-wandb-watcher", description=__doc__)
    parser.add_argument("--api_addr", "--api-addr", required=True, help="URL of the rollout server")
    parser.add_argument("--tp", type=int, required=True, help="GPUs per inference server")
    parser.add_argument(
        "--node_num", "--node-num", type=int, required=True, help="number of this node, part of the metric names"
    )
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.tp <= GPUS_PER_NODE:
        parser.error(f"--tp is {arguments.tp}; it must lie between 1 and {GPUS_PER_NODE}, the GPUs of a node")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        import wandb
    except ImportError:
        missing = MissingExtraError("watching inference nodes", package="wandb", extra="wandb")
        print(f"inference-node-wandb-watcher: {missing}", file=sys.stderr)
        return 1
    watch(arguments.api_addr.rstrip("/"), arguments.tp, arguments.node_num, wandb)
    return 0


if __name__ == "__main__":
    sys.exit(main())
