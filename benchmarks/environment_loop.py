"""How many groups per second can one environment process drive?

One environment, 128 workers, groups of 8 rollouts, each rollout a chat of three turns, against servers that answer at
once: a bare loopback process plays the inference server (OpenAI chat route) and the rollout server. What is measured
is the environment's own cost: the loop, the server manager, the HTTP client, the hand-over of each group.

The same environment code runs on this library and on atroposlib 0.4.0, alternating in one run, with the same
versions of every dependency (the old library gets a virtual environment of its own under .cache/, made at the first
run). Measured from the first rollout to the end of the last group of two full waves of workers. Reported: groups per
second of wall time, and milliseconds of the environment process's CPU time per group (which other work on the machine
changes less).

    python benchmarks/environment_loop.py
    python benchmarks/environment_loop.py --only new --groups 1024
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import site
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OLD_VENV = ROOT / ".cache" / "atroposlib-0.4.0-environments"
OLD_PACKAGES = ("atroposlib==0.4.0", "pydantic-cli", "tenacity", "jsonlines", "polars", "aiofiles", "tqdm")
TURNS, GROUP_SIZE, WORKERS = 3, 8, 128
QUESTION = "A train leaves at nine and travels for three hours at eighty kilometres an hour. " * 3
ANSWER = "It travels three times eighty kilometres, which makes two hundred and forty. " * 3


# ---------------------------------------------------------------------- servers that answer at once


def _reply(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


CHAT = _reply(
    {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": ANSWER}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
)
REGISTERED = {
    "status": "success",
    "env_id": 0,
    "wandb_name": "loop_0",
    "checkpoint_dir": "",
    "starting_step": 0,
    "checkpoint_interval": -1,
    "num_steps": 10**9,
}
STATUS = {
    "current_step": 0,
    "queue_size": 0,
    "self_queue_size": 0,
    "unallocated_fraction": 1.0,
    "max_group_size": GROUP_SIZE,
    "env_weight": 1.0,
}
REPLIES = {
    "/v1/chat/completions": CHAT,
    "/register-env": _reply(REGISTERED),
    "/info": _reply({"batch_size": 1024, "max_token_len": 4096}),
    "/status-env": _reply(STATUS),
    "/scored_data": _reply({"status": "received"}),
}
OTHER = _reply({"status": "ok"})


class InstantServer(asyncio.Protocol):
    """As little HTTP as keeps a client content: read a request, send the prepared reply."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.pending = b""

    def data_received(self, data: bytes) -> None:
        self.pending += data
        while (end := self.pending.find(b"\r\n\r\n")) >= 0:
            head = self.pending[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.pending) < end + 4 + length:
                return
            path = head.split(b" ", 2)[1].split(b"?")[0].decode()
            self.pending = self.pending[end + 4 + length :]
            self.transport.write(REPLIES.get(path, OTHER))


async def serve_instantly(port_file: str) -> None:
    server = await asyncio.get_running_loop().create_server(InstantServer, "127.0.0.1", 0)
    Path(port_file).write_text(str(server.sockets[0].getsockname()[1]))
    await server.serve_forever()


# ---------------------------------------------------------------------- the environment, the same on both libraries


def run_environment(port: int, tokenizer: str, groups: int) -> None:
    """Serve until the measurement is complete, print it, end the process."""
    from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

    tokens = list(range(100, 356))

    class LoopEnv(BaseEnv):
        name = "loop"
        num_groups = 0
        begin: tuple[float, float] | None = None

        async def setup(self) -> None:
            pass

        async def get_next_item(self) -> Any:
            return QUESTION

        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            pass

        async def rollout(self, item: str) -> list[dict[str, Any]]:
            messages = [{"role": "user", "content": item}]
            for _ in range(TURNS):
                reply = await self.server.chat_completion(messages=messages, n=1, max_tokens=64, temperature=1.0)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
                messages.append({"role": "user", "content": "Go on."})
            return messages

        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            if self.begin is None:
                self.begin = (time.perf_counter(), time.process_time())
            chats = await asyncio.gather(*(self.rollout(item) for _ in range(GROUP_SIZE)))
            group = ScoredDataGroup()
            group["tokens"] = [tokens for _ in chats]
            group["masks"] = [tokens for _ in chats]
            group["scores"] = [float(index % 2) for index, _ in enumerate(chats)]
            self.measure()
            return group, []

        def measure(self) -> None:
            self.num_groups += 1
            if self.num_groups == groups and self.begin is not None:
                wall, cpu = time.perf_counter() - self.begin[0], time.process_time() - self.begin[1]
                sys.stdout.write("RESULT " + json.dumps({"groups": groups, "wall_s": wall, "cpu_s": cpu}) + "\n")
                sys.stdout.flush()
                os._exit(0)

    url = f"http://127.0.0.1:{port}"
    config = BaseEnvConfig(
        group_size=GROUP_SIZE,
        max_num_workers=WORKERS,
        max_batches_offpolicy=1000,
        use_wandb=False,
        wandb_name="loop",
        tokenizer_name=tokenizer,
        rollout_server_url=url,
        total_steps=10**9,
    )
    servers = [APIServerConfig(model_name="m", base_url=f"{url}/v1", api_key="x", num_max_requests_at_once=1024)]
    asyncio.run(LoopEnv(config, servers, False, False).env_manager())


# ---------------------------------------------------------------------- running both


def old_python() -> str:
    """The interpreter of a virtual environment with atroposlib 0.4.0 and, for everything else, our own packages."""
    python = OLD_VENV / "bin" / "python"
    if not (OLD_VENV / "ready").exists():
        print(f"preparing {OLD_VENV} ...", file=sys.stderr)
        venv.create(OLD_VENV, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *OLD_PACKAGES], check=True)
        packages = next((OLD_VENV / "lib").glob("python*/site-packages"))
        # A path line in a .pth file adds the folder but reads no .pth file in it, so our own package stays out of sight.
        (packages / "shared_dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        (OLD_VENV / "ready").touch()
    return str(python)


def measure(which: str, port: int, tokenizer: str, arguments: argparse.Namespace) -> dict[str, float]:
    python = sys.executable if which == "new" else old_python()
    command = [python, __file__, "--role", "environment", "--port", str(port), "--tokenizer", tokenizer]
    command += ["--groups", str(arguments.groups)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.timeout)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            found: dict[str, float] = json.loads(line[7:])
            return {
                "groups_per_s": found["groups"] / found["wall_s"],
                "cpu_ms_per_group": 1000 * found["cpu_s"] / found["groups"],
            }
    raise SystemExit(f"the {which} environment gave no result:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def compare(arguments: argparse.Namespace) -> None:
    from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer

    sides = [side for side in ("old", "new") if arguments.only in (None, side)]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = str(make_tiny_tokenizer(Path(folder) / "tokenizer"))
        port_file = Path(folder) / "port"
        server = subprocess.Popen([sys.executable, __file__, "--role", "server", "--port-file", str(port_file)])
        try:
            while not port_file.exists() or not port_file.read_text():
                time.sleep(0.02)
            port = int(port_file.read_text())
            results: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for _ in range(arguments.rounds):
                for side in sides:
                    results[side].append(measure(side, port, tokenizer, arguments))
        finally:
            server.kill()
            server.wait()
    best = {side: max(runs, key=lambda run: run["groups_per_s"]) for side, runs in results.items()}
    print(f"{WORKERS} workers, groups of {GROUP_SIZE}, {TURNS} turns; best of {arguments.rounds}")
    for side, run in best.items():
        print(f"  {side}: {run['groups_per_s']:8.1f} groups/s   {run['cpu_ms_per_group']:8.2f} ms CPU per group")
    if len(best) == 2:
        wall = best["new"]["groups_per_s"] / best["old"]["groups_per_s"]
        cpu = best["old"]["cpu_ms_per_group"] / best["new"]["cpu_ms_per_group"]
        print(f"  new / old: {wall:.1f}x groups per second, {cpu:.1f}x less CPU per group")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("old", "new"), help="measure one side")
    parser.add_argument(
        "--groups", type=int, default=2 * WORKERS, help="groups per measurement: whole waves of workers"
    )
    parser.add_argument("--rounds", type=int, default=2, help="measurements per side, alternating")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds one measurement may take")
    parser.add_argument(
        "--role", choices=("compare", "server", "environment"), default="compare", help=argparse.SUPPRESS
    )
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port-file", help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "server":
        asyncio.run(serve_instantly(arguments.port_file))
    elif arguments.role == "environment":
        run_environment(arguments.port, arguments.tokenizer, arguments.groups)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
