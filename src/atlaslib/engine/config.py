"""What a user sets: :class:`EngineConfig` for the engine, :class:`SamplingParams` for one request.

Both check themselves when they are made, so that a wrong value is named where it was written and nothing
deeper in the engine has to look at it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from atlaslib.errors import ConfigError, EngineInputError, unknown_name_message

UPDATE_MODES = ("drain", "in_flight")
CACHED_KEYS = ("keep", "recompute")
MAX_TOP_LOGPROBS = 1000
MIN_TEMPERATURE = 1e-20  # of those that are not 0: logits divided by less leave the range of float32
_LARGEST = (1 << 31) - 1


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """How the engine uses the machine. The defaults fit a laptop and one GPU."""

    max_model_len: int | None = None
    """Longest prompt + reply in tokens; None: what the model's config allows, at most 32768."""
    max_num_seqs: int = 256
    """Replies that run at the same time; more wait in a queue."""
    max_prefill_tokens: int | None = None
    """Prompt tokens of one step; longer prompts are read in chunks. None: 16384 on CUDA, 2048 on CPU."""
    block_size: int = 16
    """Tokens in one block of the key-value cache."""
    num_blocks: int | None = None
    """Blocks in the cache; None: from `memory_fraction` on CUDA, from `cpu_cache_bytes` on CPU."""
    memory_fraction: float = 0.85
    """CUDA: the share of the memory that is free at start which the cache may take."""
    cpu_cache_bytes: int = 2 << 30
    """CPU: bytes the cache may take."""
    prefix_cache: bool = True
    """Keep the keys of finished prompts, so that a prompt with the same beginning starts from there."""
    update_mode: str = "drain"
    """`drain`: `updating()` lets running replies end first; `in_flight`: they pause and continue on new weights."""
    cached_keys: str = "keep"
    """In-flight updates only: `keep` the keys of the old weights or `recompute` them with the new ones."""
    exact: bool = False
    """Batch-invariant arithmetic: log-probs equal the trainer's `exact_forward` pass to the last bit. Slower."""
    cuda_graphs: bool = True
    """CUDA: replay captured graphs for decode steps and for prefill steps of few tokens."""
    fused_kernels: bool = True
    """CUDA: Triton kernels for norm, rotary embedding and gated activation inside the engine's own forward."""
    merge_weights: bool = True
    """CUDA: lay the weights of q, k, v and of gate, up next to each other, so that one product serves them. The
    parameters stay the same objects; only their storage is shared."""
    check_model: bool = True
    """At start, compare a short paged forward with the model's plain forward and refuse a model that differs."""
    seed: int | None = None
    """Where the seeds of requests without a seed come from; None: a fresh one every time."""
    num_threads: int | None = None
    """CPU: torch threads during a step; None: one for small models, torch's own number for the others."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _check_count(name, getattr(self, name), 1)
        _check_count("seed", self.seed, 0)
        for name in _CONFIG_SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {_shown(getattr(self, name))}")
        if not isinstance(self.memory_fraction, int | float) or not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"memory_fraction must lie in (0, 1], got {_shown(self.memory_fraction)}")
        if self.update_mode not in UPDATE_MODES:
            raise ConfigError(unknown_name_message("update_mode", self.update_mode, UPDATE_MODES))
        if self.cached_keys not in CACHED_KEYS:
            raise ConfigError(unknown_name_message("cached_keys", self.cached_keys, CACHED_KEYS))


_COUNTS = (
    "max_model_len", "max_num_seqs", "max_prefill_tokens", "block_size", "num_blocks", "cpu_cache_bytes", "num_threads",
)  # fmt: skip
_CONFIG_SWITCHES = ("prefix_cache", "exact", "cuda_graphs", "fused_kernels", "merge_weights", "check_model")


def _check_count(name: str, value: Any, low: int) -> None:
    if value is not None and (not _whole(value) or value < low):
        raise ConfigError(f"{name} must be a whole number of at least {low}, got {_shown(value)}")


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled. Order: bias, penalties, temperature, top-k, top-p, min-p.

    Example: ``SamplingParams(n=8, temperature=1.0, max_tokens=64, stop=["\\n\\n"], seed=7)``.
    """

    n: int = 1
    """Samples of the same prompt; the prompt is read once for all of them."""
    max_tokens: int = 256
    min_tokens: int = 0
    """No stop token or stop string ends a sample before this many tokens."""
    temperature: float = 1.0
    """0 is greedy; otherwise at least 1e-20."""
    top_k: int = 0
    """0 or -1: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Counts prompt and reply tokens."""
    presence_penalty: float = 0.0
    """Counts reply tokens, as `frequency_penalty` does."""
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    seed: int | None = None
    """The same seed gives the same reply whatever runs beside it (sample i of n uses its own stream)."""
    logprobs: int = 0
    """Top-k alternatives to report for every sampled token (from the distribution it was sampled from)."""
    prompt_logprobs: int | None = None
    """None: off; 0: log-prob of every prompt token; k: also the k most likely tokens at each place."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if not isinstance(self.stop or [], list | tuple):
            raise EngineInputError(f"stop must be a string or a list of strings, got {_shown(self.stop)}")
        self.stop = list(self.stop or [])
        self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids or [])
        self.logit_bias = _biases(self.logit_bias or {})
        self.top_k = 0 if self.top_k == -1 else self.top_k
        for name, low, high in _WHOLE_RANGES:
            _check_whole(name, getattr(self, name), low, high)
        for name, low_f, high_f in _REAL_RANGES:
            _check_real(name, getattr(self, name), low_f, high_f)
        for name in _SWITCHES:
            _check_switch(name, getattr(self, name))
        check_temperature(self.temperature)
        if self.min_tokens > self.max_tokens:
            raise EngineInputError(f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}")
        if self.top_p == 0.0:
            raise EngineInputError("top_p must be larger than 0; temperature=0 is greedy")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise EngineInputError(f"stop must hold non-empty strings, got {self.stop!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise EngineInputError(f"seed must be a whole number, got {self.seed!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Nothing but the temperature shapes the distribution, and no alternatives are asked for."""
        untouched = not self.logit_bias and self.repetition_penalty == 1.0
        unpenalised = self.presence_penalty == 0.0 and self.frequency_penalty == 0.0
        untruncated = self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0
        return untouched and unpenalised and (untruncated or self.greedy) and self.logprobs == 0


_WHOLE_RANGES: list[tuple[str, int, int]] = [
    ("n", 1, 1024),
    ("max_tokens", 0, _LARGEST),
    ("min_tokens", 0, _LARGEST),
    ("top_k", 0, _LARGEST),
    ("logprobs", 0, MAX_TOP_LOGPROBS),
    ("prompt_logprobs", 0, MAX_TOP_LOGPROBS),
]
_REAL_RANGES: list[tuple[str, float, float]] = [
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -10.0, 10.0),
    ("frequency_penalty", -10.0, 10.0),
]


_SWITCHES = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
_MAX_BIAS = 1e6


def _check_whole(name: str, value: Any, low: int, high: int) -> None:
    if value is None and name == "prompt_logprobs":
        return
    if not _whole(value) or not low <= value <= high:
        raise EngineInputError(f"{name} must be a whole number between {low} and {high}, got {_shown(value)}")


def _check_real(name: str, value: Any, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:  # nan is in no range
        raise EngineInputError(f"{name} must be a number between {low:g} and {high:g}, got {_shown(value)}")


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise EngineInputError(f"{name} must be true or false, got {_shown(value)}")


def check_temperature(value: float) -> None:
    """A temperature by which logits can be divided, or 0."""
    if value != 0.0 and not value >= MIN_TEMPERATURE:
        raise EngineInputError(f"temperature must be 0 or at least {MIN_TEMPERATURE:g}, got {_shown(value)}")


def _token_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list | tuple | set | frozenset) or not all(map(_whole, value)):
        raise EngineInputError(f"{name} must be a list of token ids, got {_shown(value)}")
    return list(value)


def _biases(value: Any) -> dict[int, float]:
    """Token id -> number; ids may be text, as JSON writes them."""
    try:
        biases = {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise EngineInputError(f"logit_bias must give a number for each token id, got {_shown(value)}") from error
    for token, bias in biases.items():
        _check_real(f"logit_bias of token {token}", bias, -_MAX_BIAS, _MAX_BIAS)
    return biases


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
