"""Log-probs of a microbatch under a model, whatever wraps it.

The decoder gives hidden states for the whole rows; only the positions that predict a trained token pass through the head.
Wrappers that must see a forward call (DDP, FSDP, DeepSpeed) see one: the computation runs inside the wrapped module's forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from atlaslib.algorithms import head_kernels
from atlaslib.algorithms.logprobs import HeadOptions, TokenLogprobs, token_logprobs
from atlaslib.engine.exact import exact_forward
from atlaslib.errors import ConfigError
from atlaslib.trainers.exact_policy import exact_logprobs
from atlaslib.trainers.flat_attention import FlatPlan, flat_attention
from atlaslib.types import Microbatch

ENTROPY_SAMPLE = 1024
"""On a GPU without the fused head kernels the entropy that is only logged is taken from about this many tokens."""


class PolicyForward:
    """Computes :class:`TokenLogprobs` of microbatches; remembers the settings that do not change in a run."""

    def __init__(
        self,
        *,
        unwrap: Callable[[Any], Any],
        chunk_size: int | None = None,
        at_temperature: bool = True,
        entropy_gradient: bool = False,
        exact: bool = False,
        around: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._unwrap, self._chunk_size, self._at_temperature = unwrap, chunk_size, at_temperature
        self._entropy_gradient, self._exact = entropy_gradient, exact
        self._around = around

    def __call__(self, model: Any, batch: Microbatch, *, with_entropy: bool = False) -> TokenLogprobs:
        """Columns of the result: the trained token first, then the distilled candidates when the batch has any."""
        inner = self._unwrap(model)

        def compute() -> TokenLogprobs:
            return self._compute(inner, batch, with_entropy)

        return run_as_forward(model, inner, compute)  # type: ignore[no-any-return]

    def _compute(self, inner: Any, batch: Microbatch, with_entropy: bool) -> TokenLogprobs:
        base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        decoder, head = find_decoder(base), base.get_output_embeddings()
        attention = exact_forward(base) if self._exact else flat_attention(base, flat_plan(batch))
        with attention, self._around(base):
            output = decoder(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
        hidden = output.last_hidden_state.reshape(-1, output.last_hidden_state.shape[-1])
        picked = hidden.index_select(0, batch.source_index)
        targets = batch.target_ids.unsqueeze(1)
        if batch.distill_ids is not None:
            targets = torch.cat([targets, batch.distill_ids], dim=1)
        temperature = batch.temperature if self._at_temperature else torch.ones_like(batch.temperature)
        if batch.num_trained_tokens == 0:
            # DDP waits for a gradient of every parameter from every process, of the head's too
            return with_whole_head(head, lambda: TokenLogprobs(0.0 * _everything(head, hidden).expand(0, 1), None))
        if self._exact:
            return exact_logprobs(
                lambda part: model_logits(base, decoder, part),
                picked,
                targets,
                temperature,
                chunk_size=self._chunk_size,
                with_entropy=with_entropy,
                entropy_gradient=self._entropy_gradient,
            )
        if not is_plain_linear(head):
            return _chunked_head_logprobs(
                head, picked, targets, temperature, self._chunk_size, head_options(base.config), with_entropy
            )
        return with_whole_head(
            head, lambda: self._head_logprobs(base, head, picked, targets, temperature, with_entropy)
        )

    def _head_logprobs(
        self,
        base: Any,
        head: Any,
        picked: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor,
        with_entropy: bool,
    ) -> TokenLogprobs:
        autocast = torch.is_autocast_enabled(picked.device.type)
        shared: dict[str, Any] = {
            "bias": head.bias,
            "chunk_size": self._chunk_size,
            "head": head_options(base.config),
            "compute_dtype": torch.get_autocast_dtype(picked.device.type) if autocast else None,
        }
        free = head_kernels.usable(picked) and shared["head"].softcap is None
        exact = with_entropy and (
            self._entropy_gradient or free or picked.device.type == "cpu" or picked.shape[0] <= ENTROPY_SAMPLE
        )
        result = token_logprobs(picked, head.weight, targets, temperature=temperature, with_entropy=exact, **shared)
        if not with_entropy or exact:
            return result
        with torch.no_grad():  # only for the log: every so many-th token says enough
            stride = -(-picked.shape[0] // ENTROPY_SAMPLE)
            some = token_logprobs(
                picked[::stride],
                head.weight,
                targets[::stride, 0],
                temperature=temperature[::stride],
                with_entropy=True,
                **shared,
            )
        assert some.entropy is not None
        return TokenLogprobs(result.logprobs, some.entropy.mean().expand(picked.shape[0]))


def with_whole_head(head: Any, compute: Callable[[], TokenLogprobs]) -> TokenLogprobs:
    """FSDP puts the head's weights together when the head is called: ``compute``, which reads them itself, runs in its place."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return compute()
    from torch.distributed.fsdp import FSDPModule  # a heavy import, for runs of several processes

    return run_as_forward(head, head, compute) if isinstance(head, FSDPModule) else compute()  # type: ignore[no-any-return]


def _everything(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[] depends on every parameter."""
    return sum((parameter.sum() for parameter in head.parameters()), hidden.sum())


def run_as_forward(wrapper: Any, inner: Any, compute: Callable[[], Any]) -> Any:
    """Run ``compute`` inside ``wrapper``'s forward call, in place of ``inner``'s own forward."""
    if wrapper is inner and not inner._forward_hooks and not inner._forward_pre_hooks:
        return compute()
    had_own = "forward" in inner.__dict__
    original = inner.forward

    def replacement(*_: Any, **__: Any) -> Any:
        restore()
        return compute()

    def restore() -> None:
        if had_own:
            inner.forward = original
        else:
            inner.__dict__.pop("forward", None)

    inner.forward = replacement
    try:
        return wrapper()
    finally:
        restore()


def model_logits(model: Any, decoder: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[c, V] what the model makes of hidden states [c, H] (head, scale, soft cap): its forward with the decoder's part done."""
    output = run_as_forward(model, decoder, lambda: BaseModelOutputWithPast(last_hidden_state=hidden[None]))
    logits: torch.Tensor = output.logits[0]
    return logits


def find_decoder(model: Any) -> Any:
    """The part of a causal language model that ends in hidden states."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        decoder = getattr(model, getattr(model, "base_model_prefix", "model") or "model", None)
    if decoder is None or decoder is model:
        raise ConfigError(
            f"cannot find the decoder of {type(model).__name__}; a causal language model of transformers is needed"
        )
    return decoder


def register_head(model: Any) -> None:
    """DeepSpeed ZeRO-3 puts a parameter together for the module that owns it; the head's is read by the whole model, backward too."""
    head = (model.get_base_model() if hasattr(model, "get_base_model") else model).get_output_embeddings()
    for parameter in head.parameters():
        if hasattr(parameter, "ds_id"):
            import deepspeed

            deepspeed.zero.register_external_parameter(model, parameter)


def is_plain_linear(head: Any) -> bool:
    """A head that is one matrix (and bias): an adapter or a quantised layer is not."""
    return isinstance(head, torch.nn.Linear) and not hasattr(head, "base_layer") and head.weight.is_floating_point()


def head_options(config: Any) -> HeadOptions:
    """What some families do to logits beyond the linear map."""
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = 1.0
    if getattr(config, "logit_scale", None):
        scale = float(config.logit_scale)
    if getattr(config, "logits_scaling", None):
        scale = 1.0 / float(config.logits_scaling)
    return HeadOptions(logit_scale=scale, softcap=None if softcap is None else float(softcap))


def flat_plan(batch: Microbatch) -> FlatPlan | None:
    """How attention reads a flat row; None for plain rows."""
    if batch.gather_index is None or batch.place_index is None or batch.runs is None:
        return None
    return FlatPlan(gather=batch.gather_index, place=batch.place_index, runs=batch.runs)


def module_head_logprobs(
    head: Any, hidden: torch.Tensor, temperature: torch.Tensor, options: HeadOptions
) -> torch.Tensor:
    """[c, V] log-probs of every token at ``temperature`` [c], through any head."""
    logits = head(hidden).float() * options.logit_scale
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    return torch.log_softmax(logits / temperature.unsqueeze(1), dim=-1)


def _chunked_head_logprobs(
    head: Any,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    chunk_size: int | None,
    options: HeadOptions,
    with_entropy: bool,
) -> TokenLogprobs:
    """The same through a head that is a module of its own kind; chunks are recomputed in the backward pass."""

    def chunk(part: torch.Tensor, ids: torch.Tensor, divisor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = module_head_logprobs(head, part, divisor, options)
        entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else log_p.new_zeros(part.shape[0])
        return log_p.gather(1, ids), entropy

    size = chunk_size or 1024
    pieces = [
        torch.utils.checkpoint.checkpoint(
            chunk, hidden[i : i + size], targets[i : i + size], temperature[i : i + size], use_reentrant=False
        )
        for i in range(0, hidden.shape[0], size)
    ]
    logprobs = torch.cat([piece[0] for piece in pieces])
    return TokenLogprobs(logprobs, torch.cat([piece[1] for piece in pieces]) if with_entropy else None)


@contextlib.contextmanager
def adapter_disabled(model: Any) -> Iterator[None]:
    """The model without its LoRA adapter: the reference of an adapter run."""
    with model.disable_adapter():
        yield


def zero_dropout(model: Any) -> None:
    """Every dropout probability to 0, in modules and in the attention settings."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
