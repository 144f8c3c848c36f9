"""From logits to tokens and log-probs: pure tensor functions, no state, the same on CPU and CUDA.

One uniform number per row picks the token by inverse CDF. The number is a hash of (seed of the sample, index of
the token), so a reply does not depend on what else is in the batch, on preemption, or on the device's generator.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from atlaslib.engine.cpu import native_sampling

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_CHUNK = 256
_SORT_WIDTH = 1024


@dataclass(kw_only=True, slots=True)
class RowParams:
    """Sampling settings of R rows; every tensor is [R] on the logits' device."""

    temperatures: Tensor  # float32, 0 = greedy
    seeds: Tensor  # int64, one stream per sample
    counters: Tensor  # int64, index of the token within its reply
    plain: bool = True  # no row needs anything below
    top_ks: Tensor | None = None  # int64, 0 = off
    top_ps: Tensor | None = None  # float32
    min_ps: Tensor | None = None  # float32
    repetition: Tensor | None = None  # float32
    presence: Tensor | None = None  # float32
    frequency: Tensor | None = None  # float32
    prompt_tokens: list[list[int]] = field(default_factory=list)  # for penalties, [R][...]
    reply_tokens: list[list[int]] = field(default_factory=list)
    biases: list[dict[int, float]] = field(default_factory=list)
    num_top: int = 0  # alternatives to report
    unit_temperature: bool = False  # every row has temperature 1 (known on the host: saves a pass)
    any_greedy: bool = True


@dataclass(kw_only=True, slots=True)
class Sampled:
    """What one step chose; every tensor is [R] unless it says otherwise."""

    tokens: Tensor  # int64
    logprobs: Tensor  # float32, at the distribution the token was drawn from
    temperature_logprobs: Tensor  # float32, softmax(logits / T) without truncation, bias or penalties
    raw_logprobs: Tensor  # float32, softmax(logits)
    top_ids: Tensor | None = None  # int64 [R, k]
    top_logprobs: Tensor | None = None  # float32 [R, k]


def mix_seed(seed: int, index: int) -> int:
    """A 63-bit stream seed for sample `index` of a request with `seed`."""
    x = (seed * 2 + 1) & _MASK64
    x = (x + (index + 1) * _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK64
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK64
    return (x ^ (x >> 31)) >> 1


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(seeds: Tensor, counters: Tensor) -> Tensor:
    """One number in [0, 1) per row: splitmix64 of (seed, counter), 53 bits. float64 [R]."""
    x = seeds + (counters + 1) * _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).to(torch.float64) * (2.0**-53)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Index of the first entry whose running sum exceeds u * total; [R, V] and [R] -> int64 [R].

    Two levels (sums of 256 entries, then inside one) so that no running sum over the whole vocabulary is made. The
    chosen entry always has a positive weight.
    """
    rows, vocab = weights.shape
    if vocab % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, _CHUNK - vocab % _CHUNK))
    chunks = weights.view(rows, -1, _CHUNK)
    outer = chunks.sum(-1).double().cumsum(-1)  # [R, C]
    target = u * outer[:, -1]
    chosen = (outer <= target[:, None]).sum(-1, keepdim=True).clamp_(max=outer.shape[1] - 1)  # [R, 1]
    end = outer.gather(1, chosen)[:, 0]
    start = torch.where(chosen[:, 0] > 0, outer.gather(1, (chosen - 1).clamp_(min=0))[:, 0], 0.0)
    share = ((target - start) / (end - start)).clamp_(0.0, 1.0 - 2.0**-53)
    inner = chunks.gather(1, chosen[:, :, None].expand(-1, -1, _CHUNK))[:, 0].double().cumsum(-1)
    inside = (inner <= (share * inner[:, -1])[:, None]).sum(-1).clamp_(max=_CHUNK - 1)
    return chosen[:, 0] * _CHUNK + inside


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `tokens`; [R, V] -> float32 [R]. Temperature 0 counts as 1."""
    scaled = _scaled(logits.float(), temperature)
    return scaled.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(scaled, dim=-1)


def all_logprobs(logits: Tensor) -> Tensor:
    """log softmax of float32 [R, V], by the same sum as :func:`token_logprobs` (torch's own is off by 2e-5 on CPU)."""
    return logits - torch.logsumexp(logits, dim=-1, keepdim=True)


def _scaled(logits: Tensor, temperature: Tensor | float) -> Tensor:
    if isinstance(temperature, Tensor):
        return logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    return logits if temperature in (0.0, 1.0) else logits / temperature


def sample(logits: Tensor, params: RowParams) -> Sampled:
    """Choose one token per row and say how likely it was."""
    logits = logits.float()
    return _sample_plain(logits, params) if params.plain else _sample_shaped(logits, params)


def _sample_plain(logits: Tensor, params: RowParams) -> Sampled:
    native = native_sampling.sample_rows(logits, params.temperatures, params.seeds, params.counters)
    if native is not None:
        tokens, logprobs, raw = native
        return Sampled(tokens=tokens, logprobs=logprobs, temperature_logprobs=logprobs, raw_logprobs=raw)
    scaled = logits if params.unit_temperature else _scaled(logits, params.temperatures)
    peak, best = scaled.max(dim=-1, keepdim=True)
    weights = (scaled - peak).exp_()
    tokens = inverse_cdf(weights, uniforms(params.seeds, params.counters))
    if params.any_greedy:
        tokens = torch.where(params.temperatures > 0, tokens, best[:, 0])
    picked = scaled.gather(1, tokens[:, None]) - peak
    logprobs = (picked - weights.sum(dim=-1, keepdim=True).log())[:, 0]
    raw = logprobs if params.unit_temperature else token_logprobs(logits, tokens)
    return Sampled(tokens=tokens, logprobs=logprobs, temperature_logprobs=logprobs, raw_logprobs=raw)


def _sample_shaped(logits: Tensor, params: RowParams) -> Sampled:
    shaped = shape_logits(logits, params)
    logprobs = all_logprobs(shaped)
    tokens = inverse_cdf(logprobs.exp(), uniforms(params.seeds, params.counters))
    tokens = torch.where(params.temperatures > 0, tokens, shaped.argmax(dim=-1))
    sampled = Sampled(
        tokens=tokens,
        logprobs=logprobs.gather(1, tokens[:, None])[:, 0],
        temperature_logprobs=token_logprobs(logits, tokens, params.temperatures),
        raw_logprobs=token_logprobs(logits, tokens),
    )
    if params.num_top:
        sampled.top_logprobs, sampled.top_ids = logprobs.topk(min(params.num_top, logits.shape[1]), dim=-1)
    return sampled


def shape_logits(logits: Tensor, params: RowParams) -> Tensor:
    """Bias, penalties, temperature, top-k, top-p, min-p, in this order; excluded tokens become -inf."""
    shaped = apply_penalties(apply_bias(logits, params.biases), params)
    shaped = _scaled(shaped, params.temperatures)
    sampling = params.temperatures > 0
    if params.top_ks is not None and bool((params.top_ks > 0).any()):
        shaped = keep_top_k(shaped, torch.where(sampling, params.top_ks, 0))
    if params.top_ps is not None and bool((params.top_ps < 1).any()):
        shaped = keep_top_p(shaped, torch.where(sampling, params.top_ps, 1.0))
    if params.min_ps is not None and bool((params.min_ps > 0).any()):
        shaped = keep_min_p(shaped, torch.where(sampling, params.min_ps, 0.0))
    return shaped


def apply_bias(logits: Tensor, biases: list[dict[int, float]]) -> Tensor:
    entries = [(row, token, bias) for row, bias_of in enumerate(biases) for token, bias in bias_of.items()]
    if not entries:
        return logits
    rows, tokens, values = zip(*entries, strict=True)
    where = (torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device))
    return logits.index_put(where, torch.tensor(values, dtype=logits.dtype, device=logits.device), accumulate=True)


def count_tokens(tokens: list[list[int]], vocab: int, device: torch.device) -> Tensor:
    """How often each token occurs in each list; float32 [R, V]."""
    counts = torch.zeros(len(tokens), vocab, device=device)
    flat = [(row, token) for row, row_tokens in enumerate(tokens) for token in row_tokens]
    if flat:
        rows, columns = torch.tensor(flat, device=device).unbind(1)
        counts.index_put_((rows, columns), torch.ones(len(flat), device=device), accumulate=True)
    return counts


def apply_penalties(logits: Tensor, params: RowParams) -> Tensor:
    """Repetition divides positive and multiplies negative logits of seen tokens; presence and frequency subtract."""
    if params.repetition is None or params.presence is None or params.frequency is None:
        return logits
    vocab, device = logits.shape[1], logits.device
    in_reply = count_tokens(params.reply_tokens, vocab, device)
    seen = (in_reply + count_tokens(params.prompt_tokens, vocab, device)) > 0
    factor = params.repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(seen, repeated, logits)
    return logits - params.frequency[:, None] * in_reply - params.presence[:, None] * (in_reply > 0)


def keep_top_k(logits: Tensor, top_ks: Tensor) -> Tensor:
    """Keep the k largest of each row (ties with the k-th stay); k = 0 keeps all."""
    vocab = logits.shape[1]
    widest = int(top_ks.clamp(max=vocab).max())
    if widest == 0:
        return logits
    values = logits.topk(widest, dim=-1).values
    threshold = values.gather(1, (top_ks.clamp(1, widest) - 1)[:, None])
    return logits.masked_fill((top_ks > 0)[:, None] & (logits < threshold), -torch.inf)


def keep_top_p(logits: Tensor, top_ps: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens whose probability reaches p (ties with the last one stay)."""
    probs = torch.softmax(logits, dim=-1)
    values = probs.topk(min(_SORT_WIDTH, probs.shape[1]), dim=-1).values
    if bool((values.sum(-1) < top_ps).any()):
        values = probs.sort(dim=-1, descending=True).values
    before = values.cumsum(-1) - values  # mass of everything more likely
    last_kept = ((before < top_ps[:, None]).sum(-1, keepdim=True) - 1).clamp_(min=0)
    excluded = (top_ps < 1)[:, None] & (probs < values.gather(1, last_kept))
    return logits.masked_fill(excluded, -torch.inf)


def keep_min_p(logits: Tensor, min_ps: Tensor) -> Tensor:
    """Keep tokens at least `min_p` times as likely as the most likely one."""
    threshold = logits.max(dim=-1, keepdim=True).values + min_ps.log()[:, None]
    return logits.masked_fill((min_ps > 0)[:, None] & (logits < threshold), -torch.inf)
