"""The rollout server against the one it replaces, measured in the same run.

    python benchmarks/rollout_server.py [--quick] [--write] [--sizes 512,4096,32768] [--variants json,gzip,binary]

Installs atroposlib 0.4.0 in a virtual environment of its own (under .cache/), compiles benchmarks/loadgen.c, then runs
each server in turn, pinned to one core, with the load generator on another. Groups hold 8 sequences with tokens, masks,
scores and inference log-probs; batches hold 256 sequences. Every number is measured over HTTP from outside the server.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import os
import platform
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_server_report import BATCH, OLD_VERSION, SEQUENCES, Results, Row, markdown, show

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
DOC = ROOT / "docs" / "benchmarks" / "rollout_server.md"
GROUPS_PER_BATCH = BATCH // SEQUENCES
BINARY_TYPE = "application/vnd.atropos+msgpack"
WARM_BYTES = 1_200_000_000
JSON_HEADERS = "Content-Type: application/json"


# ---- bodies -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Body:
    """A pre-serialised request body and how to ask for what it became."""

    path: Path
    post_headers: str
    batch_headers: str
    bytes_per_token: float
    stored_bytes: int
    """Of a group in the server."""


def make_group(length: int) -> dict[str, Any]:
    """A group as an environment would send it: an eighth is prompt (masked -100, log-prob 1.0), float32 log-probs."""
    rng = random.Random(length)
    prompt = length // 8
    tokens = [[rng.randrange(151_000) for _ in range(length)] for _ in range(SEQUENCES)]
    logprobs = [[1.0] * prompt + [_float32(-rng.expovariate(2.0)) for _ in range(length - prompt)] for _ in tokens]
    masks = [[-100] * prompt + row[prompt:] for row in tokens]
    scores = [rng.random() for _ in tokens]
    return {"tokens": tokens, "masks": masks, "scores": scores, "inference_logprobs": logprobs}


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def make_bodies(folder: Path, length: int, variants: list[str]) -> dict[str, Body]:
    group = make_group(length)
    text = json.dumps(group).encode()
    made = {"json": text}
    if "gzip" in variants:
        made["gzip"] = gzip.compress(text, 1)
    if "binary" in variants:
        sys.path.insert(0, str(ROOT / "src"))
        from atroposlib.api.binary import encode_group

        made["binary"] = encode_group({**group, "group_id": "#" * 24})
    headers = {
        "json": (JSON_HEADERS, "Accept: application/json"),
        "gzip": (f"{JSON_HEADERS}\nContent-Encoding: gzip", "Accept: application/json\nAccept-Encoding: gzip"),
        "binary": (f"Content-Type: {BINARY_TYPE}", f"Accept: {BINARY_TYPE}"),
    }
    bodies = {}
    for variant in variants:
        path = folder / f"{variant}-{length}"
        path.write_bytes(made[variant])
        bodies[variant] = Body(
            path=path,
            post_headers=headers[variant][0],
            batch_headers=headers[variant][1],
            bytes_per_token=len(made[variant]) / (SEQUENCES * length),
            stored_bytes=len(made["binary" if variant == "binary" else "json"]),
        )
    return bodies


# ---- servers and load -------------------------------------------------------------------------------------------------


def old_python() -> Path:
    """The interpreter of an environment with the old library, made on first use."""
    folder = CACHE / f"atroposlib-{OLD_VERSION}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "--no-deps", f"atroposlib=={OLD_VERSION}"], check=True)
        # Its server needs no more than these of the library's requirements.
        subprocess.run(
            [*pip, "fastapi", "uvicorn[standard]", "pydantic", "numpy"], check=True, stderr=subprocess.DEVNULL
        )
        (folder / "ready").touch()
    return python


def load_generator() -> Path:
    source, binary = ROOT / "benchmarks" / "loadgen.c", CACHE / "loadgen"
    if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
        CACHE.mkdir(exist_ok=True)
        subprocess.run([os.environ.get("CC", "cc"), "-O2", "-o", str(binary), str(source)], check=True)
    return binary


OLD_MAIN = (
    "import sys, uvicorn; from atroposlib.api.server import app;"
    "uvicorn.run(app, host='127.0.0.1', port=int(sys.argv[1]), log_level='error')"
)


class Server:
    """A server process on its own core."""

    def __init__(self, kind: str, core: int, folder: Path) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = int(sock.getsockname()[1])
        if kind == "old":
            command = [str(old_python()), "-c", OLD_MAIN, str(self.port)]
        else:
            command = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(self.port)]
            data = folder / f"data-{self.port}"
            command += [] if kind == "page" else ["--no-live-page"]
            command += ["--in-memory"] if kind == "memory" else ["--data-dir", str(data)]
        self.log = (folder / f"{kind}-{self.port}.log").open("wb")
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, cwd=folder, preexec_fn=lambda: os.sched_setaffinity(0, {core})
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.call("GET", "/status")
                return
            except OSError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise RuntimeError(f"{kind} server did not start; see {self.log.name}") from None
                time.sleep(0.05)

    def call(self, method: str, path: str, value: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = None if value is None else json.dumps(value)
        connection.request(method, path, body=body, headers={"Content-Type": "application/json"} if body else {})
        answer = connection.getresponse().read()
        connection.close()
        return json.loads(answer)

    def register(self) -> None:
        """A trainer and an environment that sends whole groups, as in a real run."""
        settings = {"batch_size": BATCH, "max_token_len": 32768, "num_steps": 1000, "save_checkpoint_interval": 10}
        settings |= {"wandb_group": "g", "wandb_project": "p", "checkpoint_dir": "c", "starting_step": 0}
        self.call("POST", "/register", settings)
        self.call("GET", "/batch")
        env = {"max_token_length": 32768, "desired_name": "e", "weight": 1.0, "group_size": SEQUENCES}
        assert self.call("POST", "/register-env", env)["env_id"] == 0

    def rss(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) * 1024

    def cpu_seconds(self) -> float:
        """Processor time the server has used, all threads: a measure that other work on the machine hardly disturbs."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


@dataclass(kw_only=True)
class Load:
    """One group of connections of the load generator (see loadgen.c)."""

    name: str
    method: str
    path: str
    headers: str = ""
    body: Path | None = None
    connections: int = 1
    count: int = 1
    flags: str = "m"

    def arguments(self) -> list[str]:
        body = str(self.body) if self.body else "-"
        return [
            *(self.name, self.method, self.path, self.headers, body, str(self.connections), str(self.count), self.flags)
        ]


def drive(port: int, core: int, *loads: Load, limit_s: float = 1800) -> dict[str, dict[str, Any]]:
    """Run the load generator; its report per name."""
    command = [str(load_generator()), str(port), str(limit_s)]
    for load in loads:
        command += load.arguments()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    if done.returncode:
        raise RuntimeError(f"load generator failed: {done.stderr.strip() or done.returncode}")
    reports = {report["name"]: report for report in map(json.loads, done.stdout.splitlines())}
    for report in reports.values():
        if report["ok"] != report["replies"]:
            raise RuntimeError(
                f"{report['name']}: {report['replies'] - report['ok']} bad replies: {report['last_reply']}"
            )
    return reports


# ---- what is measured -------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Setup:
    """Where and how much."""

    folder: Path
    server_core: int
    client_core: int
    connections: int
    quick: bool


def measure(setup: Setup, kind: str, variant: str, length: int, body: Body, batches: int) -> Row:
    """Post `batches` batches' worth of groups and take them out again, several times in one server; the last time counts.

    Memory is read in the first round, while the server has never held anything else. A server is started once and then
    works for days, so its speed is that of one that has carried `WARM_BYTES`, by when memory and the files of the journal
    are used again. The old server, which has no such state, gets one round before the one that counts; where its batches
    take minutes, none.
    """
    server = Server(kind, setup.server_core, setup.folder)
    try:
        server.register()
        row = measure_round(setup, server, kind, variant, length, body, batches)
        held = row.bytes_per_token
        for _ in range(more_rounds(kind, length, batches, body)):
            row = measure_round(setup, server, kind, variant, length, body, batches)
        row.bytes_per_token = held
        return row
    finally:
        server.stop()
        shutil.rmtree(setup.folder / f"data-{server.port}", ignore_errors=True)


def more_rounds(kind: str, length: int, batches: int, body: Body) -> int:
    """Rounds after the first."""
    if kind == "old":
        return 1 if length <= 4096 else 0
    return -(-WARM_BYTES // (batches * GROUPS_PER_BATCH * body.stored_bytes))


def measure_round(setup: Setup, server: Server, kind: str, variant: str, length: int, body: Body, batches: int) -> Row:
    groups = batches * GROUPS_PER_BATCH
    post = Load(name="post", method="POST", path="/scored_data", headers=body.post_headers, body=body.path)
    post.connections, post.count = setup.connections, groups
    post.flags = "mi" if variant == "binary" else "m"
    take = Load(name="batch", method="GET", path="/batch", headers=body.batch_headers, count=batches)
    before, cpu = server.rss(), server.cpu_seconds()
    posted = drive(server.port, setup.client_core, post)["post"]
    post_cpu = server.cpu_seconds() - cpu
    time.sleep(1.0 if kind != "old" else 0.0)  # ours makes queued groups smaller when nothing else is to do
    memory = server.rss() - before
    if server.call("GET", "/status")["queue_size"] != groups:
        raise RuntimeError(f"{kind}: {groups} groups were posted, /status says {server.call('GET', '/status')}")
    cpu = server.cpu_seconds()
    taken = drive(server.port, setup.client_core, take)["batch"]
    batch_cpu = server.cpu_seconds() - cpu
    if taken["bytes_in"] < groups * SEQUENCES * length:
        raise RuntimeError(f"{kind}: the batches hold {taken['bytes_in']} bytes, too few for {groups} groups")
    return Row(
        server=kind,
        variant=variant,
        length=length,
        groups=groups,
        posts_per_s=groups / posted["seconds"],
        post_p50_ms=posted["p50_ms"],
        post_p99_ms=posted["p99_ms"],
        batch_ms=taken["mean_ms"],
        groups_per_s=groups / (posted["seconds"] + taken["seconds"]),
        post_cpu_ms=1e3 * post_cpu / groups,
        batch_cpu_ms=1e3 * batch_cpu / batches,
        bytes_per_token=memory / (groups * SEQUENCES * length),
        body_bytes_per_token=body.bytes_per_token,
    )


def measure_draining(setup: Setup, kind: str, big: Body, small: Body, batches: int) -> dict[str, float]:
    """Latency of small POSTs while large batches are taken out of the queue on another connection."""
    server = Server(kind, setup.server_core, setup.folder)
    try:
        server.register()
        fill = Load(name="fill", method="POST", path="/scored_data", headers=big.post_headers, body=big.path)
        fill.connections, fill.count = setup.connections, batches * GROUPS_PER_BATCH
        drive(server.port, setup.client_core, fill)
        take = Load(name="batch", method="GET", path="/batch", headers=big.batch_headers, count=batches)
        post = Load(name="post", method="POST", path="/scored_data", headers=small.post_headers, body=small.path)
        post.count, post.flags = 100_000, ""
        reports = drive(server.port, setup.client_core, take, post)
        return {key: reports["post"][key] for key in ("replies", "p50_ms", "p99_ms", "max_ms")}
    finally:
        server.stop()
        shutil.rmtree(setup.folder / f"data-{server.port}", ignore_errors=True)


def measure_status(setup: Setup, kind: str, folder: Path, queue_lengths: list[int]) -> dict[int, float]:
    """Median latency of /status-env (GET with a JSON body) with ever more groups queued."""
    tiny, question = folder / "tiny", folder / "question"
    row = [1] * 4
    tiny.write_text(
        json.dumps({"tokens": [row] * SEQUENCES, "masks": [row] * SEQUENCES, "scores": [0.5] * SEQUENCES, "env_id": 0})
    )
    question.write_text('{"env_id": 0}')
    server = Server(kind, setup.server_core, setup.folder)
    result, queued = {}, 0
    try:
        server.register()
        for length in queue_lengths:
            fill = Load(name="fill", method="POST", path="/scored_data", headers=JSON_HEADERS, body=tiny)
            fill.connections, fill.count = 4, length - queued
            drive(server.port, setup.client_core, fill)
            queued = length
            ask = Load(name="ask", method="GET", path="/status-env", headers=JSON_HEADERS, body=question, count=300)
            medians = [drive(server.port, setup.client_core, ask)["ask"]["p50_ms"] for _ in range(3)]
            result[length] = min(medians)  # of three rounds the one that other work on the machine disturbed least
        return result
    finally:
        server.stop()
        shutil.rmtree(setup.folder / f"data-{server.port}", ignore_errors=True)


# ---- the run ----------------------------------------------------------------------------------------------------------


def machine_facts() -> dict[str, Any]:
    facts = {line.split(":")[0].strip(): line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if ":" in line}
    part = facts.get("CPU part", "")
    model = facts.get("model name") or {"0xd0c": "Arm Neoverse N1", "0xd40": "Arm Neoverse V1"}.get(part, f"CPU {part}")
    memory = next((int(line.split()[1]) / 2**20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 1),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def counts(length: int, server: str, variant: str, quick: bool) -> int:
    """Batches to post and take: enough to measure, few enough to wait for."""
    if server == "old":
        return {512: 4, 4096: 2, 32768: 1}.get(length, 1) if not quick else 1
    most = {512: 32, 4096: 8, 32768: 2}.get(length, 1)
    if variant == "binary":
        most = {512: 64, 4096: 16, 32768: 3}.get(length, 1)
    return max(1, most // 4) if quick else most


def run(setup: Setup, sizes: list[int], variants: list[str], servers: list[str]) -> Results:
    results = Results(machine=machine_facts())
    bodies = {length: make_bodies(setup.folder, length, sorted({"json", *variants})) for length in sizes}
    for length in sizes:
        for variant in variants:
            for kind in servers:
                if kind == "old" and (variant == "binary" or (variant == "gzip" and length > 4096 and setup.quick)):
                    continue  # it knows no binary form; its gzip of the largest batch takes half a minute
                if kind == "page" and (variant == "gzip" or length > 4096):
                    continue  # enough to see what the page costs
                batches = counts(length, kind, variant, setup.quick)
                row = measure(setup, kind, variant, length, bodies[length][variant], batches)
                results.rows.append(row)
                old = results.old(length, variant)
                ratio = (
                    f"{row.groups_per_s / old.groups_per_s:6.1f}x (cpu {old.cpu_ms / row.cpu_ms:6.1f}x)" if old else ""
                )
                print(
                    f"{length:6d} {variant:7s}{kind:8s} {row.groups_per_s:9.1f} groups/s {ratio}"
                    f"   POST {row.posts_per_s:9.1f}/s p50 {row.post_p50_ms:8.2f} p99 {row.post_p99_ms:8.2f} cpu"
                    f" {row.post_cpu_ms:8.3f} ms   /batch {row.batch_ms:9.1f} cpu {row.batch_cpu_ms:8.2f} ms"
                    f"   {row.bytes_per_token:6.1f} B/token",
                    flush=True,
                )
    small, big = min(sizes), 4096 if 4096 in sizes else max(sizes)
    for kind in [kind for kind in servers if kind != "page"]:
        batches = 2 if kind == "old" else 8 if setup.quick else 32
        results.draining[kind] = measure_draining(setup, kind, bodies[big]["json"], bodies[small]["json"], batches)
        print(f"POST of {small} tokens while draining {big}: {kind:8s} {results.draining[kind]}", flush=True)
        lengths = [100, 1000] if setup.quick else [100, 1000, 10_000]
        results.status[kind] = measure_status(setup, kind, setup.folder, lengths)
        print(f"/status-env p50 by queued groups: {kind:8s} {results.status[kind]}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--quick", action="store_true", help="few groups: minutes become half a minute, numbers get rougher"
    )
    parser.add_argument("--write", action="store_true", help=f"write {DOC.relative_to(ROOT)}")
    parser.add_argument("--sizes", default="512,4096,32768", help="tokens per sequence")
    parser.add_argument("--variants", default="json,gzip,binary")
    parser.add_argument("--servers", default="old,memory,durable,page")
    parser.add_argument("--connections", type=int, default=8, help="connections that post at the same time")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="rollout-bench-", dir=CACHE if CACHE.exists() else None) as folder:
        setup = Setup(
            folder=Path(folder),
            server_core=cores[0],
            client_core=cores[-1],
            connections=options.connections,
            quick=options.quick,
        )
        sizes = [int(size) for size in options.sizes.split(",")]
        results = run(setup, sizes, options.variants.split(","), options.servers.split(","))
    show(results)
    if options.write:
        DOC.parent.mkdir(parents=True, exist_ok=True)
        DOC.write_text(markdown(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
