"""Calling reward functions of every kind, with failures kept apart from scores.

A reward function is a callable ``fn(prompts=..., completions=..., **columns) -> sequence of float or None``, plain or async, a
class instance, a sequence-classification model (object, folder or hub id), or the name of a registered reward. ``None`` means
the function does not apply to that sample. An exception sets the sample aside: it is counted and trains nothing; it is never 0.
A list of another length than the batch sets the whole batch aside: nobody knows which value belongs to which completion.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from atlaslib.errors import ConfigError
from atroposlib.errors import RewardComputationError

logger = logging.getLogger(__name__)
RewardFunc = Any
"""str | PreTrainedModel | callable"""


class WrongLengthError(RewardComputationError, ValueError):
    """A reward function returned more or fewer values than there are completions."""


@dataclass(kw_only=True, slots=True)
class RewardInputs:
    """What reward functions see, one entry per completion."""

    prompts: list[Any]
    """text, or a list of messages for chat data"""
    completions: list[Any]
    """text, or ``[{"role": "assistant", "content": text}]`` for chat data"""
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """every other column of the data"""

    def __len__(self) -> int:
        return len(self.prompts)

    def one(self, index: int) -> RewardInputs:
        """The inputs of a single sample."""
        return RewardInputs(
            prompts=[self.prompts[index]],
            completions=[self.completions[index]],
            completion_ids=[self.completion_ids[index]],
            columns={name: [values[index]] for name, values in self.columns.items()},
        )


@dataclass(kw_only=True, slots=True)
class RewardTable:
    """Rewards of N samples by F functions."""

    names: list[str]
    values: list[list[float]]
    """[N][F]; NaN = does not apply"""
    totals: list[float]
    """[N] weighted sum; NaN = set aside"""
    failures: dict[str, int]
    """function name -> samples it failed on"""


@dataclass(kw_only=True, slots=True, frozen=True)
class Failure:
    """A function that has given no reward so far; processes exchange it, so the error is text."""

    prompts: frozenset[str]
    """it failed on all completions of these"""
    error: str
    """the first"""
    wrong_length: bool


Record = tuple[set[str], dict[str, Failure]]
"""functions that gave an answer at least once; those that had given none when they failed"""


class RewardSet:
    """The reward functions of a run, their names and weights."""

    def __init__(
        self,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None,
        *,
        weights: Sequence[float] | None = None,
        processing_classes: Any = None,
        model_init_kwargs: dict[str, Any] | None = None,
        device: Any = "cpu",
        offload: bool = False,
    ) -> None:
        given = [] if reward_funcs is None else reward_funcs
        functions = list(given) if isinstance(given, list | tuple) else [given]
        tokenizers = (
            processing_classes
            if isinstance(processing_classes, list | tuple)
            else [processing_classes] * len(functions)
        )
        if len(tokenizers) != len(functions):
            raise ConfigError(
                f"{len(tokenizers)} reward_processing_classes for {len(functions)} reward functions; give one per function"
            )
        self.functions = [
            resolve_reward(function, tokenizer, model_init_kwargs, device, offload)
            for function, tokenizer in zip(functions, tokenizers, strict=True)
        ]
        self.names = _unique([reward_name(function) for function in self.functions])
        self.weights = [1.0] * len(functions) if weights is None else [float(weight) for weight in weights]
        if len(self.weights) != len(functions):
            raise ConfigError(
                f"reward_weights has {len(self.weights)} entries for {len(functions)} reward functions ({', '.join(self.names)}); give one weight per function"
            )
        self._worked: set[str] = set()
        self._failures: dict[str, Failure] = {}
        self._causes: dict[str, Exception] = {}
        self._all_worked = len(functions) == 0
        self._shown: set[str] = set()

    def __len__(self) -> int:
        return len(self.functions)

    def score(self, inputs: RewardInputs, extra: dict[str, Any] | None = None) -> RewardTable:
        """Call every function once for the batch (async ones together); one that raises is asked again sample by sample."""
        columns: list[list[float]] = []
        failed: list[set[int]] = []
        answers = _call_all(self.functions, self.names, inputs, extra or {})
        for function, name, answer in zip(self.functions, self.names, answers, strict=True):
            if isinstance(answer, Exception):
                column, bad = self._after_failure(function, name, answer, inputs, extra or {})
            else:
                column, bad = answer, set()
            self._remember(name, inputs, bad, answer)
            columns.append(column)
            failed.append(bad)
        rows = [[column[index] for column in columns] for index in range(len(inputs))]
        broken = set().union(*failed) if failed else set()
        totals = [math.nan if index in broken else self._total(row) for index, row in enumerate(rows)]
        if not broken and totals and all(map(math.isnan, totals)) and "none applies" not in self._shown:
            self._shown.add("none applies")
            logger.warning(
                "no reward applies to any of %d completions (all are None or NaN); they train nothing", len(totals)
            )
        return RewardTable(
            names=list(self.names),
            values=rows,
            totals=totals,
            failures={name: len(bad) for name, bad in zip(self.names, failed, strict=True)},
        )

    def raise_if_broken(self, *, min_prompts: int = 1, gather: Callable[[list[Record]], list[Record]] = list) -> None:
        """A function that failed on every sample of ``min_prompts`` prompts or more, and never gave a reward, is a mistake.

        So is, whatever the prompts, one that never returned as many values as there were completions. Of several processes all
        call this together and ``gather`` chains their lists: what worked in one is no mistake, and all come to the same end.
        """
        if self._all_worked:
            return
        records = gather([(set(self._worked), dict(self._failures))])
        worked = set().union(*(names for names, _ in records))
        self._worked |= worked
        self._all_worked = worked.issuperset(self.names)
        for name in self.names:
            failures = [failed[name] for _, failed in records if name in failed]
            prompts = frozenset().union(*(failure.prompts for failure in failures))
            enough = len(prompts) >= min_prompts or any(failure.wrong_length for failure in failures)
            if failures and enough and name not in worked:
                raise RewardComputationError(
                    f"the reward {name!r} failed on every completion so far, of {len(prompts)} prompts "
                    f"({failures[0].error}); correct it, or the columns it is given"
                ) from self._causes.get(name)

    def _after_failure(
        self, function: Callable[..., Any], name: str, error: Exception, inputs: RewardInputs, extra: dict[str, Any]
    ) -> tuple[list[float], set[int]]:
        """Ask sample by sample; not after a wrong length, which a constant list would turn into a right one."""
        single = not isinstance(error, WrongLengthError)
        self._show(name, len(inputs), error, "asking sample by sample" if single else "all of it is set aside")
        if single:
            return _call_singly(function, name, inputs, extra)
        return [math.nan] * len(inputs), set(range(len(inputs)))

    def _show(self, name: str, count: int, error: Exception, consequence: str) -> None:
        """Every failed batch is logged, each kind of failure once with its traceback."""
        kind = f"{name} {type(error).__name__}"
        first = kind not in self._shown
        self._shown.add(kind)
        logger.error(
            "reward %s failed on a batch of %d, %s: %r",
            name,
            count,
            consequence,
            error,
            exc_info=error if first else None,
        )

    def _remember(self, name: str, inputs: RewardInputs, bad: set[int], answer: Any) -> None:
        if len(bad) < len(inputs):
            self._worked.add(name)
        elif name not in self._worked and isinstance(answer, Exception):
            error = self._causes.setdefault(name, answer)
            before = self._failures[name].prompts if name in self._failures else frozenset()
            self._failures[name] = Failure(
                prompts=before | {str(prompt) for prompt in inputs.prompts},
                error=f"{type(error).__name__}: {error}",
                wrong_length=isinstance(error, WrongLengthError),
            )

    def _total(self, row: list[float]) -> float:
        """Weighted sum of the functions that apply; NaN when none does."""
        applying = [(value, weight) for value, weight in zip(row, self.weights, strict=True) if not math.isnan(value)]
        return sum(value * weight for value, weight in applying) if applying else math.nan


def reward_name(function: RewardFunc) -> str:
    """The name of a reward in metrics: ``__name__``, what the registry was asked for, ``name``, or the class."""
    for attribute in ("__name__", "created_as", "name"):
        value = getattr(function, attribute, None)
        if isinstance(value, str) and value:
            return value
    return type(function).__name__


def resolve_reward(
    function: RewardFunc, tokenizer: Any, model_init_kwargs: dict[str, Any] | None, device: Any, offload: bool
) -> Callable[..., Any]:
    """Turn a name or a model into a callable; callables stay as they are."""
    if isinstance(function, str):
        registered = _registered_reward(function)
        if registered is not None:
            return registered
        return ModelReward.load(function, tokenizer, model_init_kwargs, device, offload)
    if hasattr(function, "config") and hasattr(function, "forward"):
        return ModelReward(function, tokenizer, device, offload)
    if not callable(function):
        raise ConfigError(f"reward function {function!r} is neither callable nor a model nor a name")
    return function  # type: ignore[no-any-return]


def _registered_reward(name: str) -> Callable[..., Any] | None:
    from atroposlib.envs.reward_fns import registry

    registry_object = getattr(registry, "registry", registry)
    with contextlib.suppress(KeyError, ValueError):
        created: Callable[..., Any] = registry_object.create(name)
        return created
    return None


class ModelReward:
    """A sequence-classification model as a reward: its first logit for prompt and completion."""

    def __init__(self, model: Any, tokenizer: Any, device: Any, offload: bool) -> None:
        from transformers import AutoTokenizer

        self.model, self._device, self._offload = model, device, offload
        self.name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__).rstrip("/").split("/")[-1]
        self._tokenizer = tokenizer or AutoTokenizer.from_pretrained(model.config._name_or_path)
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        model.config.pad_token_id = self._tokenizer.pad_token_id
        model.eval()
        model.to("cpu" if offload else device)

    @classmethod
    def load(cls, name: str, tokenizer: Any, kwargs: dict[str, Any] | None, device: Any, offload: bool) -> ModelReward:
        """Load by folder or hub id; an unknown name is an error that also lists the registered rewards."""
        from transformers import AutoModelForSequenceClassification

        try:
            model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, **(kwargs or {}))
        except OSError as error:
            raise ConfigError(
                f"reward {name!r} is neither a registered reward nor a loadable sequence-classification model: {error}"
            ) from error
        return cls(model, tokenizer, device, offload)

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        """One score per completion."""
        import torch

        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        batch = self._tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with on_device(self.model, self._device, self._offload), torch.inference_mode():
            logits = self.model(**batch.to(self._device)).logits[:, 0]
        return [float(value) for value in logits.float().tolist()]

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, list):
            return str(self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False))
        return f"{prompt}{completion}"


@contextlib.contextmanager
def on_device(model: Any, device: Any, offload: bool) -> Iterator[None]:
    """With ``offload``, the model is on ``device`` only inside the block and on the CPU outside."""
    if not offload:
        yield
        return
    model.to(device)
    try:
        yield
    finally:
        model.to("cpu")


def _call_all(
    functions: list[Callable[..., Any]], names: list[str], inputs: RewardInputs, extra: dict[str, Any]
) -> list[list[float] | Exception]:
    answers: list[Any] = []
    for function in functions:
        try:
            answers.append(function(**_arguments(function, inputs, extra)))
        except Exception as error:  # user code: anything may come out of it
            answers.append(error)
    waiting = {index: answer for index, answer in enumerate(answers) if inspect.isawaitable(answer)}
    for index, value in zip(waiting, _run_together(list(waiting.values())), strict=True):
        answers[index] = value
    return [
        answer if isinstance(answer, Exception) else _checked(answer, name, len(inputs))
        for answer, name in zip(answers, names, strict=True)
    ]


def _call_singly(
    function: Callable[..., Any], name: str, inputs: RewardInputs, extra: dict[str, Any]
) -> tuple[list[float], set[int]]:
    column: list[float] = []
    bad: set[int] = set()
    for index in range(len(inputs)):
        answer = _call_all([function], [name], inputs.one(index), extra)[0]
        if isinstance(answer, Exception):
            logger.debug("reward %s failed on sample %d", name, index, exc_info=answer)
            bad.add(index)
            column.append(math.nan)
        else:
            column.append(answer[0])
    return column, bad


def _arguments(function: Callable[..., Any], inputs: RewardInputs, extra: dict[str, Any]) -> dict[str, Any]:
    """Everything there is, or only what the signature names when it takes no ``**kwargs``."""
    everything = {
        **extra,
        **inputs.columns,
        "prompts": inputs.prompts,
        "completions": inputs.completions,
        "completion_ids": inputs.completion_ids,
    }
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return everything
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return everything
    return {name: value for name, value in everything.items() if name in parameters}


def _run_together(awaitables: list[Any]) -> list[Any]:
    if not awaitables:
        return []

    async def gather() -> list[Any]:
        return list(await asyncio.gather(*awaitables, return_exceptions=True))

    return asyncio.run(gather())


def _checked(answer: Any, name: str, expected: int) -> list[float] | Exception:
    try:
        values = [math.nan if value is None else float(value) for value in answer]
    except (TypeError, ValueError) as error:
        return error
    if any(map(math.isinf, values)):
        return ValueError(f"reward {name} returned an infinite value; give a finite number, or None where none applies")
    if len(values) != expected:
        return WrongLengthError(
            f"the reward {name} returned {len(values)} values for {expected} completions; "
            "return a list with one number, or None, per completion, in their order"
        )
    return values


def _unique(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return result
