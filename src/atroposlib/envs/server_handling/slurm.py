"""Which inference servers a Slurm job runs, read from its node list."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from atroposlib.errors import ConfigError

logger = logging.getLogger(__name__)

FIRST_PORT = 9000
GPUS_PER_NODE = 8
SCONTROL_TIMEOUT_S = 30.0


def expand_node_list(node_list: str) -> list[str]:
    """Host names of a Slurm node list, in order and with leading zeros kept.

    Example: ``expand_node_list("gpu[01-03,7],login1")`` gives gpu01, gpu02, gpu03, gpu7, login1.
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(node_list):
        hosts.extend(_expand(part))
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    parts = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text)
    return [part.strip() for part in parts if part.strip()]


def _expand(pattern: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", pattern)
    if match is None:
        return [pattern]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    numbers: list[str] = []
    for piece in match.group(1).split(","):
        first, _, last = piece.strip().partition("-")
        try:
            width, low, high = len(first), int(first), int(last or first)
        except ValueError as error:
            raise ConfigError(
                f"cannot read the node list part {pattern!r}: {piece!r} is not a number or range"
            ) from error
        numbers.extend(str(number).zfill(width) for number in range(low, high + 1))
    return [host for number in numbers for host in _expand(f"{head}{number}{tail}")]


def host_names(node_list: str) -> list[str]:
    """Host names as ``scontrol`` gives them, or expanded here where there is no ``scontrol``."""
    scontrol = shutil.which("scontrol")
    if scontrol is not None:
        try:
            reply = subprocess.run(
                [scontrol, "show", "hostnames", node_list],
                capture_output=True,
                text=True,
                timeout=SCONTROL_TIMEOUT_S,
                check=True,
            )
            return reply.stdout.split()
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("scontrol failed (%s); expanding the node list %r without it", error, node_list)
    return expand_node_list(node_list)


def slurm_server_urls(environment: Mapping[str, str] | None = None) -> list[str]:
    """URLs of the job's inference servers; empty outside Slurm and in a job of one node.

    The first NUM_TRAINING_NODES hosts train; on each of the others 8 // INFER_TP servers listen from port 9000.
    """
    env = os.environ if environment is None else environment
    node_list = env.get("SLURM_JOB_NODELIST")
    if not node_list:
        return []
    hosts = host_names(node_list)
    if len(hosts) < 2:
        return []
    num_training = _whole_number(env, "NUM_TRAINING_NODES", 0, minimum=0)
    servers_per_node = GPUS_PER_NODE // _whole_number(env, "INFER_TP", 1, minimum=1)
    serving = hosts[num_training:]
    if not serving or servers_per_node == 0:
        raise ConfigError(
            f"no inference server is left: the job has {len(hosts)} nodes, NUM_TRAINING_NODES is {num_training}, "
            f"INFER_TP is {env.get('INFER_TP', '1')}; at least one node must serve and INFER_TP be at most {GPUS_PER_NODE}"
        )
    return [f"http://{host}:{FIRST_PORT + i}/v1" for host in serving for i in range(servers_per_node)]


def _whole_number(env: Mapping[str, str], name: str, default: int, minimum: int) -> int:
    raw = env.get(name) or str(default)
    try:
        value = int(raw)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise ConfigError(f"the variable {name} must be a whole number of at least {minimum}, got {raw!r}")
    return value
