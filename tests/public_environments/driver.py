"""Runs one published environment file through its own command line and says what came out.

`environments.yaml` is the table of the files; `stand_ins.py` is the process that an environment runs in.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from atroposlib.api.client import TrainerClient
from atroposlib.testing.harness_server import HarnessServer
from public_environments.stand_ins import fill
from rollout_process import ServerProcess

HERE = Path(__file__).parent
TABLE: dict[str, Any] = yaml.safe_load((HERE / "environments.yaml").read_text())
RUNS = [(file, command) for file, entry in TABLE["works"].items() for command in entry["commands"].split()]
NUM_GROUPS, NUM_BATCHES = 2, 3
LIMIT_S = 150.0
KEYS = ("OPENAI", "ANTHROPIC", "TAVILY", "NOUS", "XAI", "OPENROUTER", "DEEPSEEK")


@dataclass(kw_only=True)
class Run:
    """One environment file and one command of it, in a folder of its own."""

    file: str
    command: str
    root: Path  # holds environments/ and venv/
    stand_ins: Path  # what stand_ins.write_files made
    folder: Path
    counter: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.entry: dict[str, Any] = TABLE["works"][self.file]
        self.log = self.folder / "environment.log"

    # -- what it is given -------------------------------------------------------------------------------------------

    def answer(self, prompt: str, choice: int) -> str:
        """The endpoint's reply: one after the other, so that the members of a group differ."""
        answers = self.entry.get("answers", TABLE["answers"])
        sums = re.findall(r"(\d+)\+1\?", prompt)
        texts = re.findall(r"some text \d+", prompt)
        text = str(answers[next(self.counter) % len(answers)])
        text = text.replace("@SUM@", str(int(sums[-1]) + 1 if sums else 7))
        return text.replace("@REVERSED@", texts[-1][::-1] if texts else "x")

    def arguments(self, endpoint: str, rollout_server: str | None) -> list[str]:
        tokenizer = str(self.stand_ins / "tokenizer")
        if self.command == "script":
            return [self._named(argument, endpoint) for argument in self.entry["arguments"]]
        server = {"base_url": endpoint, "api_key": "x", "model_name": "m", "server_type": "vllm"}
        server["tokenizer_name"] = tokenizer
        flags: dict[str, Any] = {"env.tokenizer_name": tokenizer, "env.use_wandb": False, "env.group_size": 4}
        flags["env.max_token_length"] = 2048
        if self.command == "process":
            flags |= {"env.total_steps": NUM_GROUPS, "env.data_path_to_save_groups": self.folder / "groups.jsonl"}
        elif self.command == "evaluate":
            flags |= {"env.data_dir_to_save_evals": self.folder / "evaluations"}
        else:
            flags |= {"env.rollout_server_url": rollout_server, "env.total_steps": 100, "env.steps_per_eval": 1}
            flags |= {"env.batch_size": 8}
        if "servers" in self.entry:
            config = self.folder / "servers.yaml"
            config.write_text(yaml.safe_dump({"openai": [server] * self.entry["servers"]}))
            flags["config"] = config
        else:
            flags |= {f"openai.{name}": value for name, value in server.items()}
        flags |= self.entry.get("flags", {}) | self.entry.get(f"{self.command}_flags", {})
        pairs = [(f"--{name}", self._named(str(value), endpoint)) for name, value in flags.items()]
        return [self.command, *itertools.chain.from_iterable(pairs), "--slurm", "false"]

    def _named(self, text: str, endpoint: str) -> str:
        return text.replace("{endpoint}", endpoint).replace("{folder}", str(self.stand_ins))

    def variables(self, endpoint: str) -> dict[str, str]:
        samples = HERE.parent / "atroposlib" / "envs" / "verifiers_samples"
        path = os.pathsep.join(str(folder) for folder in (self.root, samples))
        given = {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OPENAI_BASE_URL": endpoint, "WANDB_MODE": "disabled"}
        given |= {"NLTK_DATA": str(self.stand_ins / "nltk"), "WIKISQL_CACHE_DIR": str(self.stand_ins / "wikisql")}
        given |= {f"{name}_API_KEY": "x" for name in KEYS}
        given |= {"TQDM_DISABLE": "1", "HF_DATASETS_OFFLINE": "1"}
        return {**os.environ, **given, **self.entry.get("variables", {})}

    def start(self, endpoint: str, rollout_server: str | None = None) -> subprocess.Popen[bytes]:
        target = self.entry.get("module", self.root / "environments" / self.entry.get("runner", self.file))
        python = self.root / "venv" / "bin" / "python"
        head = [str(part) for part in (python, HERE / "stand_ins.py", self.stand_ins, endpoint, target)]
        with self.log.open("wb") as log:
            return subprocess.Popen(
                head + self.arguments(endpoint, rollout_server),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self.variables(endpoint),
                start_new_session=True,
            )

    # -- what comes out ---------------------------------------------------------------------------------------------

    def run(self, tokenizer: Any) -> str | None:
        """What is wrong with what came out, or None."""
        for name, (count, row) in self.entry.get("data", {}).items():
            rows = [fill(row, i) for i in range(count)]
            (self.root / "environments" / self.file).with_name(name).write_text(json.dumps(rows))
        with HarnessServer(tokenizer=tokenizer, reply=self.answer) as server:
            return self._serve(server.base_url) if self.command == "serve" else self._until_done(server)

    def _until_done(self, server: HarnessServer) -> str | None:
        process = self.start(server.base_url)
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"not done after {LIMIT_S:.0f} s"
        finally:
            _end(process)
        if status:
            return f"exit status {status}"
        if self.command == "process" and (num_groups := self._num_groups()) < NUM_GROUPS:
            return f"{num_groups} of {NUM_GROUPS} scored groups written"
        return None if server.requests else "the endpoint was asked for nothing"

    def _num_groups(self) -> int:
        file = self.folder / "groups.jsonl"
        groups = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return sum(bool(group.get("scores")) and len(group["scores"]) == len(group["tokens"]) for group in groups)

    def _serve(self, endpoint: str) -> str | None:
        batches: list[Any] = []
        with ServerProcess(self.folder, "--in-memory") as api:
            trainer = TrainerClient(api.url)
            trainer.register(
                batch_size=self.entry.get("batch_size", 8),
                max_token_len=8192,
                num_steps=50,
                checkpoint_dir=str(self.folder),
                save_checkpoint_interval=1,
            )
            process = self.start(endpoint, api.url)
            try:
                deadline = time.monotonic() + LIMIT_S
                while len(batches) < NUM_BATCHES and time.monotonic() < deadline and process.poll() is None:
                    batch = trainer.next_batch(timeout_s=1.0)
                    if batch is not None:
                        trainer.ack(batch.seq)
                        batches.append(batch)
            finally:
                _end(process)
                trainer.close()
        if len(batches) == NUM_BATCHES and all(group["scores"] for batch in batches for group in batch.groups):
            return None
        return f"{len(batches)} of {NUM_BATCHES} batches reached the trainer"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the environment and what it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(10)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
