"""Sampling with vLLM servers: requests spread over them, weights pushed through a folder, every push verified.

After a push each server samples a few tokens and the trainer computes the same log-probs; a server that answers "done" but kept old
weights (as some builds do with the head of tied models) or an old prefix cache is found out before a sample counts. The server is told
the name of the weights it carries and asked for it after every round: one that was started again meanwhile, or got other weights
from somebody else, is found out, too.
"""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlaslib.errors import SamplerError
from atlaslib.generation.protocol import PROBE_TOKENS, Request, SampledCompletion, SamplingSettings

if TYPE_CHECKING:
    from atlaslib.trainers.grpo import GRPOTrainer

logger = logging.getLogger(__name__)
Scorer = Callable[[list[int], list[int], float], list[float]]
"""(prompt ids, completion ids, temperature) -> the trainer's log-probs of the completion"""


class VLLMClient:
    """One vLLM server. The only code that knows its routes."""

    def __init__(self, url: str, *, model_name: str | None = None, timeout_s: float = 120.0) -> None:
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self.model_name = model_name
        self.max_model_len: int | None = None
        """longest sequence, as the server says"""
        self.version: int | None = None
        """policy version whose weights were pushed and verified"""
        self.label: str | None = None
        """what the server was told these weights are called; None where it cannot keep a name"""

    def wait_until_ready(self) -> None:
        """Poll ``/health``; a server that does not answer in time is an error that names it."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    break
            except (OSError, urllib.error.URLError) as error:
                if time.monotonic() > deadline:
                    raise SamplerError(
                        f"vLLM server {self.url} did not answer within {self._timeout_s:g} s: {error}"
                    ) from error
                time.sleep(0.2)
        served = self._call("GET", "/v1/models")["data"][0]
        self.model_name = self.model_name or str(served["id"])
        self.max_model_len = served.get("max_model_len")

    def complete(self, prompt_ids: list[int], n: int, seed: int, settings: SamplingSettings) -> list[dict[str, Any]]:
        """Choices of ``/v1/completions`` with token ids in and out."""
        body: dict[str, Any] = {
            "model": self.model_name,
            "prompt": prompt_ids,
            "n": n,
            "seed": seed % (1 << 31),
            "max_tokens": settings.max_tokens,
            "min_tokens": settings.min_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k if settings.top_k else -1,
            "min_p": settings.min_p or 0.0,
            "repetition_penalty": settings.repetition_penalty,
            "stop_token_ids": list(settings.stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        if settings.regex is not None:
            body["structured_outputs"] = {"regex": settings.regex}
        choices = list(self._call("POST", "/v1/completions", body)["choices"])
        if len(choices) != n:
            raise SamplerError(f"vLLM server {self.url} returned {len(choices)} completions for n={n}")
        return choices

    def load_weights(self, folder: Path) -> None:
        """Let running requests end, forget cached prefixes, reload from the folder, go on."""
        self._call("POST", "/pause?mode=wait&clear_cache=true")
        try:
            self._call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        finally:
            self._call("POST", "/resume")

    def name_weights(self, label: str) -> bool:
        """Tell the server what its weights are called; False where it cannot keep a name (before vLLM 0.30)."""
        try:
            self._call("POST", "/update_weight_version", {"new_version": label})
        except SamplerError as error:
            if error.status != 404:
                raise
            return False
        return True

    def weights_name(self) -> str:
        """What the server says its weights are called."""
        return str(self._call("GET", "/weight_info").get("weight_version"))

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, method=method, headers={"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=max(self._timeout_s, 600.0)) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            raise SamplerError(
                f"vLLM server {self.url}{path} answered {error.code}: {error.read().decode(errors='replace')[:300]}",
                status=error.code,
            ) from error
        except OSError as error:
            raise SamplerError(f"vLLM server {self.url}{path} cannot be reached: {error}") from error
        return json.loads(text) if text.strip().startswith(("{", "[")) else {}


@dataclass(kw_only=True, slots=True)
class Probe:
    """What a probe found: how far the server's log-probs are from the trainer's, at the sampling temperature and at 1."""

    at_temperature: float
    at_one: float


class VLLMServerSampler:
    """Spreads requests over servers; results only count with the newest weights on every server used."""

    def __init__(
        self,
        clients: Sequence[VLLMClient],
        *,
        export: Callable[[int], Path] | None,
        score: Scorer,
        probe_ids: list[int],
        tolerance: float,
        temperature: float,
        pushes: bool = True,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        """``pushes``: whether this process is the one of the run that pushes; ``meet`` waits for the others."""
        self._pushes, self._meet = pushes, meet
        self._clients, self._export, self._score = list(clients), export, score
        self._probe_ids, self._tolerance, self._temperature = probe_ids, tolerance, temperature
        self._logprobs_at_temperature = True
        self._pool = ThreadPoolExecutor(max_workers=32, thread_name_prefix="vllm")
        self._version: int | None = None
        for client in self._clients:
            client.wait_until_ready()

    @classmethod
    def for_trainer(cls, trainer: GRPOTrainer) -> VLLMServerSampler:
        """From the trainer's config: ``vllm_host``, ``vllm_port`` + i for client i."""
        from atlaslib.generation.vllm_weights import WeightFolder, probe_ids, trainer_scorer

        config = trainer.config
        assert config.vllm_port is not None
        clients = [
            VLLMClient(f"http://{config.vllm_host}:{config.vllm_port + number}", timeout_s=config.vllm_server_timeout)
            for number in range(config.num_vllm_clients or 1)
        ]
        return cls(
            clients,
            export=WeightFolder(trainer).write,
            score=trainer_scorer(trainer),
            probe_ids=probe_ids(trainer.model.config),
            tolerance=config.vllm_probe_tolerance,
            temperature=config.temperature,
            pushes=trainer.is_world_process_zero(),
            meet=trainer.accelerator.wait_for_everyone,
        )

    def sync(self, version: int) -> None:
        """Push the weights once per version and verify them on every server."""
        if self._version == version:
            return
        folder = None if self._export is None else self._export(version)
        if folder is not None and self._pushes:
            for client in self._clients:
                client.load_weights(folder)
        self._meet()
        for client in self._clients:
            self._judge(client, self._probe(client), version)
            # The folder's name (.../v3) tells runs apart and says the version; all processes of a run give the same.
            label = None if folder is None else str(folder)
            client.label = label if label is not None and client.name_weights(label) else None
            client.version = version
        self._version = version

    def generate(self, requests: list[Request], settings: SamplingSettings) -> list[list[SampledCompletion]]:
        """``n`` completions per request, in order; requests go round the servers."""
        if self._version is None:
            raise SamplerError("the vLLM servers have no weights of this run yet; sync() comes first")
        for client in self._clients:
            if client.version != self._version:
                raise SamplerError(
                    f"vLLM server {client.url} carries version {client.version}, the trainer is at {self._version}"
                )
        count = len(self._clients)
        futures = [
            self._pool.submit(self._one, self._clients[number * count // len(requests)], request, settings)
            for number, request in enumerate(requests)
        ]
        results = [future.result() for future in futures]
        for client in self._clients:
            self._check_weights(client)
        return results

    def close(self) -> None:
        """End the threads; the servers belong to somebody else."""
        self._pool.shutdown(wait=False)

    @staticmethod
    def _check_weights(client: VLLMClient) -> None:
        found = client.label if client.label is None else client.weights_name()
        if found != client.label:
            raise SamplerError(
                f"vLLM server {client.url} carries weights called {found!r} instead of {client.label!r}: it was started again, or another "
                "trainer uses it; the samples of this round are not used"
            )

    def _one(self, client: VLLMClient, request: Request, settings: SamplingSettings) -> list[SampledCompletion]:
        choices = client.complete(request.prompt_ids, request.n, request.seed, settings)
        return [self._sampled(client, choice, settings) for choice in choices]

    def _sampled(self, client: VLLMClient, choice: dict[str, Any], settings: SamplingSettings) -> SampledCompletion:
        token_ids, logprobs = _tokens(choice, client.url)
        wanted_raw = not settings.logprobs_at_temperature or settings.temperature == 1.0
        usable = wanted_raw or self._logprobs_at_temperature
        return SampledCompletion(
            token_ids=token_ids,
            logprobs=logprobs if usable else None,
            finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
            versions=[] if client.version is None else [client.version],
        )

    def _probe(self, client: VLLMClient) -> Probe:
        settings = SamplingSettings(max_tokens=PROBE_TOKENS, temperature=self._temperature)
        room = (client.max_model_len or 1 << 30) - PROBE_TOKENS
        prompt = self._probe_ids[: max(1, room)]
        token_ids, logprobs = _tokens(client.complete(prompt, 1, 1, settings)[0], client.url)
        return Probe(
            at_temperature=_mean_gap(logprobs, self._score(prompt, token_ids, self._temperature)),
            at_one=_mean_gap(logprobs, self._score(prompt, token_ids, 1.0)),
        )

    def _judge(self, client: VLLMClient, probe: Probe, version: int) -> None:
        gap = min(probe.at_temperature, probe.at_one)
        self._logprobs_at_temperature = probe.at_temperature <= probe.at_one
        if gap > self._tolerance:
            raise SamplerError(
                f"vLLM server {client.url} does not carry the weights of version {version}: its log-probs differ from the trainer's by "
                f"{gap:.3g} on average (allowed {self._tolerance:g}). Does it see the folder the trainer wrote (vllm_weights_dir)? Some vLLM "
                "builds keep the old LM head of models with tied embeddings when a checkpoint has no lm_head.weight; export_weights writes one"
            )
        logger.info("vLLM server %s carries version %d (mean log-prob difference %.2g)", client.url, version, gap)


def _tokens(choice: dict[str, Any], url: str) -> tuple[list[int], list[float]]:
    """Token ids and log-probs of a choice; both must be there and as many."""
    token_ids = choice.get("token_ids")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if token_ids is None or logprobs is None or len(token_ids) != len(logprobs):
        raise SamplerError(
            f"vLLM server {url} must return token_ids and as many logprobs (vLLM 0.10.2 or newer); got {sorted(choice)}"
        )
    return [int(token) for token in token_ids], [float(value) for value in logprobs]


def _mean_gap(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / max(len(first), 1)
