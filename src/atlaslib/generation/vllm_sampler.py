"""Sampling with vLLM in the trainer's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from atlaslib.errors import ConfigError, MissingExtraError, SamplerError
from atlaslib.generation.protocol import PROBE_TOKENS, Request, SampledCompletion, SamplingSettings
from atlaslib.generation.vllm_weights import WeightFolder, probe_ids, trainer_scorer

if TYPE_CHECKING:
    from atlaslib.trainers.grpo import GRPOTrainer


class VLLMSampler:
    """A ``vllm.LLM`` started from the trainer's first weights and reloaded after each update."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        try:
            import vllm
        except ImportError as error:
            raise MissingExtraError("use_vllm", package="vllm", extra="vllm") from error
        config = trainer.config
        self._vllm, self._config = vllm, config
        self._folder, self._score = WeightFolder(trainer), trainer_scorer(trainer)
        self._probe_ids = probe_ids(trainer.model.config, config.vllm_max_model_len)
        self._version: int | None = trainer.policy_version
        self._sleep_level = config.vllm_sleep_level if can_sleep() else 0
        self._asleep = False
        self._llm = vllm.LLM(
            model=str(self._folder.write(trainer.policy_version)),
            dtype=config.vllm_dtype or "auto",
            gpu_memory_utilization=config.vllm_gpu_memory_utilization,
            max_model_len=config.vllm_max_model_len,
            enforce_eager=config.enforce_eager,
            enable_prefix_caching=config.enable_prefix_caching,
            enable_sleep_mode=self._sleep_level > 0,
            logprobs_mode="processed_logprobs" if config.unbias_log_probabilities else "raw_logprobs",
            seed=config.seed,
            **device_options(config.vllm_device),
        )

    def sync(self, version: int) -> None:
        """Reload the weights of a new version and verify them."""
        if self._version == version:
            return
        self._wake()
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self._folder.write(version))})
        self._llm.reset_prefix_cache()
        self._verify(version)
        self._version = version

    def generate(self, requests: list[Request], settings: SamplingSettings) -> list[list[SampledCompletion]]:
        """``n`` completions per request, in order; vLLM sleeps in between when asked to."""
        self._wake()
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        outputs = self._llm.generate(prompts, [self._params(request, settings) for request in requests], use_tqdm=False)
        if self._sleep_level:
            self._llm.sleep(level=self._sleep_level)
            self._asleep = True
        return [[self._sampled(completion) for completion in output.outputs] for output in outputs]

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Let the engine go."""
        self._llm = None

    def _params(self, request: Request, settings: SamplingSettings) -> Any:
        options: dict[str, Any] = {}
        if settings.regex is not None:
            options["structured_outputs"] = self._vllm.sampling_params.StructuredOutputsParams(regex=settings.regex)
        return self._vllm.SamplingParams(
            n=request.n,
            seed=request.seed % (1 << 31),
            max_tokens=settings.max_tokens,
            min_tokens=settings.min_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k or -1,
            min_p=settings.min_p or 0.0,
            repetition_penalty=settings.repetition_penalty,
            stop_token_ids=list(settings.stop_token_ids),
            logprobs=0,
            **options,
        )

    def _sampled(self, completion: Any) -> SampledCompletion:
        token_ids = list(completion.token_ids)
        logprobs = [float(entry[token].logprob) for entry, token in zip(completion.logprobs, token_ids, strict=True)]
        return SampledCompletion(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason="length" if completion.finish_reason == "length" else "stop",
            versions=[] if self._version is None else [self._version],
        )

    def _verify(self, version: int) -> None:
        settings = SamplingSettings(max_tokens=PROBE_TOKENS, temperature=1.0)
        completion = self.generate([Request(prompt_ids=self._probe_ids, seed=1)], settings)[0][0]
        expected = self._score(self._probe_ids, completion.token_ids, 1.0)
        given = completion.logprobs or []
        gap = sum(abs(a - b) for a, b in zip(given, expected, strict=True)) / max(len(expected), 1)
        if gap > self._config.vllm_probe_tolerance:
            raise SamplerError(
                f"the in-process vLLM does not carry the weights of version {version}: log-probs differ by {gap:.3g} on average "
                f"(allowed {self._config.vllm_probe_tolerance:g})"
            )


def device_options(device: str | None) -> dict[str, Any]:
    """``vllm_device`` as arguments of ``vllm.LLM``: ``cuda:1`` is the second GPU; the kind of device is that of the installed vLLM."""
    if device is None or device == "auto":
        return {}
    from vllm.platforms import current_platform

    kind, _, number = device.partition(":")
    if kind != current_platform.device_type or (number and not number.isdigit()):
        raise ConfigError(
            f"vllm_device is {device!r}, but the installed vLLM runs on {current_platform.device_type!r}; use 'auto', "
            f"{current_platform.device_type!r} or {current_platform.device_type + ':1'!r}"
        )
    return {"device_ids": [int(number)]} if number else {}


def can_sleep() -> bool:
    """vLLM refuses sleep mode where there is no GPU memory to give back."""
    return torch.cuda.is_available()
