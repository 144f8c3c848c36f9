"""Exact mode: arithmetic whose result for a row does not depend on what else is in the batch.

The engine computes a token's log-prob from one new row and a cache; a trainer computes it from a whole padded batch. In
ordinary float arithmetic the two differ in the last bits, because libraries choose another order of summation for
another shape. Here every sum has one fixed order: matrix products run in tiles of 32 rows, attention in tiles of 16
query rows and 32 keys counted from the sequence's first token (or one query at a time, compiled), functions like exp in
pieces that always take the same vector code (CUDA: see `cuda.exact_kernels`). Both sides use the same functions, so both get the same bits:

    with exact_forward(model):                       # the trainer's pass; right padding
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    logprobs = exact_token_logprobs(logits.flatten(0, 1), ids[:, 1:].flatten(), temperature)

Gradients flow through (their own order of summation is the ordinary one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from atlaslib.engine.attention import StepContext, causal_mask, configs_of
from atlaslib.engine.cpu import native_attention
from atlaslib.errors import ConfigError

NAME = "atropos_exact"
LINEAR_ROWS = 32
QUERY_ROWS = 16
KEY_TILE = 32
_PIECE = 16384  # elements: below torch's threshold for splitting work between threads
_LANES = 64  # a multiple of every vector width, so that no element takes the scalar path


def tiled(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An element-wise function whose result does not depend on where in a tensor an element lies."""
    if x.is_cuda:  # there every element takes the same code
        return function(x)
    flat = x.reshape(-1)
    count = flat.numel()
    if count % _LANES:
        flat = functional.pad(flat, (0, _LANES - count % _LANES))
    pieces = [function(piece) for piece in torch.split(flat, _PIECE)]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:count].view(x.shape)


def last_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, rows independent of each other (on CPU a single row gets company)."""
    if x.is_cuda:
        summed: Tensor = _CudaRowSum.apply(x)  # type: ignore[no-untyped-call]
        return summed
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] == 1:
        return flat.expand(2, -1).contiguous().sum(-1)[:1].view(x.shape[:-1])
    return flat.contiguous().sum(-1).view(x.shape[:-1])


class _CudaRowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from atlaslib.engine.cuda import exact_kernels

        ctx.shape = x.shape
        return exact_kernels.row_sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        expanded: Tensor = grads[0][..., None].expand(ctx.shape)
        return expanded


def _tiled_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in products of exactly LINEAR_ROWS rows."""
    if x.is_cuda:
        from atlaslib.engine.cuda import exact_kernels

        return exact_kernels.product(x, weight)
    rows = x.shape[0]
    padded = functional.pad(x, (0, 0, 0, -rows % LINEAR_ROWS)) if rows % LINEAR_ROWS else x.contiguous()
    out = x.new_empty(padded.shape[0], weight.shape[0])
    transposed = weight.t()
    for start in range(0, padded.shape[0], LINEAR_ROWS):
        torch.mm(padded[start : start + LINEAR_ROWS], transposed, out=out[start : start + LINEAR_ROWS])
    return out[:rows]


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _tiled_product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear with rows that do not influence each other."""
    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = _ExactLinear.apply(flat, weight)  # type: ignore[no-untyped-call]
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], weight.shape[0])


def exact_attention(
    query: Tensor,  # [N, rows, dim]
    key: Tensor,  # [N, keys, dim]
    value: Tensor,  # [N, keys, value_dim], finite everywhere
    allowed: Tensor,  # bool, broadcasts to [N, rows, keys]
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention with a running softmax over key tiles in a fixed order, or compiled; [N, rows, value_dim]."""
    compiled = native_attention.attend(query, key, value, allowed, scale, softcap)
    if compiled is not None:
        return compiled
    count, rows, dim = query.shape
    keys = key.shape[1]
    more_rows, more_keys = -rows % QUERY_ROWS, -keys % KEY_TILE
    allowed = functional.pad(allowed.expand(count, rows, keys), (0, more_keys, 0, more_rows))
    query = functional.pad(query, (0, 0, 0, more_rows)).contiguous().view(-1, QUERY_ROWS, dim)  # [N * tiles, 16, dim]
    tiles = (rows + more_rows) // QUERY_ROWS
    key, value = (functional.pad(x, (0, 0, 0, more_keys)) for x in (key, value))
    allowed = allowed.reshape(-1, QUERY_ROWS, keys + more_keys)
    peak = query.new_full((query.shape[0], QUERY_ROWS, 1), -torch.inf)
    total = torch.zeros_like(peak)
    out = query.new_zeros(query.shape[0], QUERY_ROWS, value.shape[2])
    for start in range(0, keys, KEY_TILE):
        part = slice(start, start + KEY_TILE)
        scores = torch.bmm(query, _for_tiles(key[:, part], tiles).transpose(1, 2)) * scale
        if softcap is not None:
            scores = tiled(torch.tanh, scores / softcap) * softcap
        scores = scores.masked_fill(~allowed[:, :, part], -torch.inf)
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        base = torch.where(higher == -torch.inf, 0.0, higher)
        weights = tiled(torch.exp, scores - base)
        shrink = tiled(torch.exp, peak - base)
        total = total * shrink + last_sum(weights)[..., None]
        out = out * shrink + torch.bmm(weights, _for_tiles(value[:, part], tiles))
        peak = higher
    out = out / torch.where(total == 0, 1.0, total)
    return out.view(count, -1, value.shape[2])[:, :rows]


def _for_tiles(x: Tensor, tiles: int) -> Tensor:
    """[N, 32, dim] repeated for every query tile of the same N."""
    return x.contiguous() if tiles == 1 else x.repeat_interleave(tiles, dim=0)


def exact_token_logprobs(logits: Tensor, tokens: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `tokens`; [R, V] -> float32 [R]. Temperature 0 counts as 1."""
    logits = logits.float()
    divisor = temperature.to(logits) if isinstance(temperature, Tensor) else logits.new_full((), temperature)
    divisor = torch.where(divisor > 0, divisor, 1.0).expand(logits.shape[0])
    if logits.is_cuda:
        found: Tensor = _CudaTokenLogprobs.apply(logits, tokens, divisor)  # type: ignore[no-untyped-call]
        return found
    scaled = logits / divisor[:, None]
    peak = scaled.amax(-1, keepdim=True)
    total = last_sum(tiled(torch.exp, scaled - peak))
    return scaled.gather(1, tokens[:, None])[:, 0] - peak[:, 0] - tiled(torch.log, total)


class _CudaTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, divisor: Tensor) -> Tensor:
        from atlaslib.engine.cuda import exact_kernels

        ctx.save_for_backward(logits, tokens, divisor)
        return exact_kernels.token_logprobs(logits, tokens, divisor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        logits, tokens, divisor = ctx.saved_tensors
        share = (grads[0] / divisor)[:, None]
        gradient = torch.softmax(logits / divisor[:, None], -1).mul_(-share)
        return gradient.scatter_add_(1, tokens[:, None], share), None, None


# inside a model's forward

_ELEMENTWISE = {
    torch._C._nn.silu,
    torch._C._nn.gelu,
    *(
        getattr(owner, name)
        for owner in (torch, torch.Tensor)
        for name in ("tanh", "sigmoid", "exp", "cos", "sin", "rsqrt")
    ),
}
_MEANS = {torch.mean, torch.Tensor.mean}
_PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}


class ExactMode(TorchFunctionMode):
    """Replaces the functions whose result may depend on the shape of the batch; this thread only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            return exact_linear(*args, **kwargs)
        if func in _ELEMENTWISE and isinstance(args[0], Tensor) and args[0].is_floating_point():
            return tiled(lambda piece: func(piece, *args[1:], **kwargs), args[0])
        if func in _MEANS and args[1:] == (-1,) and set(kwargs) <= {"keepdim"}:
            mean = last_sum(args[0]) / args[0].shape[-1]
            return mean[..., None] if kwargs.get("keepdim") else mean
        if (
            func in _PRODUCTS and args[0].shape[-1] == 1
        ):  # angles of the rotary embedding: no sum, so no reduced precision
            return args[0] * args[1]
        return func(*args, **kwargs)


class _ExactAttention(torch.autograd.Function):
    """Forward in fixed order, backward through ordinary attention recomputed from the same inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [B, heads, T, dim]
        key: Tensor,  # [B, kv_heads, T, dim]
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.settings = scale, window, softcap
        if query.is_cuda:
            from atlaslib.engine.cuda import exact_kernels

            return exact_kernels.attention(query, key, value, scale, window, softcap)
        out = exact_attention(*_by_key_head(query, key, value, window), scale, softcap)
        return out.reshape(*query.shape[:3], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        scale, window, softcap = ctx.settings
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            query, key, value, allowed = _by_key_head(inputs[0], inputs[1], inputs[2], window)
            scores = torch.bmm(query, key.transpose(1, 2)) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1)
            out = torch.bmm(weights, value).reshape(grads[0].shape)
        return (*torch.autograd.grad(out, inputs, grads[0]), None, None, None)


def _by_key_head(
    query: Tensor, key: Tensor, value: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The query heads of each key head as rows of one matrix, and which keys each row may see."""
    length, dim = query.shape[2:]
    group = query.shape[1] // key.shape[1]
    allowed = causal_mask(length, length, 0, window, query.device).repeat(group, 1)[None]
    return query.reshape(-1, group * length, dim), key.flatten(0, 1), value.flatten(0, 1), allowed


def _trainer_attention(
    module: Any,
    query: Tensor,  # [B, heads, T, dim]
    key: Tensor,  # [B, kv_heads, T, dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if attention_mask is not None and bool((attention_mask[:, 1:] & ~attention_mask[:, :-1]).any()):
        raise ConfigError("exact_forward needs right padding: tiles are counted from a sequence's first token")
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    out: Tensor = _ExactAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, scale, sliding_window, softcap
    )
    return out.transpose(1, 2), None


def _keep_padding_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The 2D padding mask as it is (True = token), for the check above."""
    return attention_mask


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Fixed order of summation for everything but attention."""
    from atlaslib.engine.model_runner import cpu_settings

    with cpu_settings(device, None), ExactMode():
        yield


@contextmanager
def exact_forward(model: Any) -> Iterator[None]:
    """A forward of `model` inside this block gives the bits the exact engine gives. Right padding."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _trainer_attention)
    AttentionMaskInterface.register(NAME, _keep_padding_mask)
    configs = configs_of(list(model.modules()))
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation_internal = NAME
    try:
        with exact_arithmetic(next(model.parameters()).device):
            yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


def attend_exact(
    context: StepContext,
    layer: int,
    query: Tensor,  # [heads, T, dim]
    key: Tensor,  # [kv_heads, T, dim]
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The engine's side: the same attention over paged keys; [T, heads, value_dim]."""
    cache = context.cache
    cache.write(layer, context.slots, key.transpose(0, 1), value.transpose(0, 1))
    heads, _, dim = query.shape
    kv_heads = key.shape[0]
    if context.tables is not None and context.lengths is not None:
        batch = context.tables.shape[0]
        keys, values = (
            cache.rows(tensor[layer], context.tables) for tensor in (cache.keys, cache.values)
        )  # [B, kv_heads, L, dim]
        place = torch.arange(keys.shape[2])[None, :]
        allowed = place < context.lengths[:, None]
        if window is not None:
            allowed = allowed & (place >= context.lengths[:, None] - window)
        allowed = allowed.repeat_interleave(kv_heads, dim=0)[:, None]
        grouped = query.transpose(0, 1).reshape(batch * kv_heads, heads // kv_heads, dim)
        out = exact_attention(grouped, keys.flatten(0, 1), values.flatten(0, 1), allowed, scale, softcap)
        return out.reshape(batch, heads, -1)
    result = query.new_empty(query.shape[1], heads, value.shape[2])
    for span in context.spans:
        rows, length = slice(span.row, span.row + span.count), span.start + span.count
        blocks = torch.from_numpy(span.blocks)[None]
        keys, values = (cache.rows(tensor[layer], blocks)[0, :, :length] for tensor in (cache.keys, cache.values))
        allowed = causal_mask(span.count, length, span.start, window, query.device).repeat(heads // kv_heads, 1)[None]
        grouped = query[:, rows].reshape(kv_heads, -1, dim)
        out = exact_attention(grouped, keys, values, allowed, scale, softcap)
        result[rows] = out.reshape(heads, span.count, -1).transpose(0, 1)
    return result
