"""Run one group of an environment in this process and say what is wrong with it.

Nothing outside is needed: a scripted server stands in for the model and a tiny tokenizer for the real one. The checks go
from the class to the finished group; the first stage that fails ends the run, because later ones would only repeat it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.group_workers import postprocess
from atroposlib.errors import PACKAGE_ADVICE
from atroposlib.testing.scripted_server import script
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer

Level = Literal["ok", "note", "error"]
DEFAULT_REPLIES = (
    "I think it is \\boxed{4}. <answer>4</answer>",
    "No idea.",
    "<think>short</think> \\boxed{7} <answer>7</answer>",
    "The answer is 12.",
)
_LONGEST_STALL_S = 1.0
_WATCH_INTERVAL_S = 0.02


@dataclass(kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    what: str
    advice: str = ""


@dataclass(kw_only=True, slots=True)
class Report:
    """Everything found, in order, and the group that was made."""

    findings: list[Finding] = field(default_factory=list)
    group: dict[str, Any] | None = None
    prompts: list[str] = field(default_factory=list)
    """What the model was asked, as text."""

    @property
    def ok(self) -> bool:
        """Whether no error was found; notes do not count."""
        return all(finding.level != "error" for finding in self.findings)

    def add(self, level: Level, what: str, advice: str = "") -> None:
        """Append a finding."""
        self.findings.append(Finding(level=level, what=what, advice=advice))

    def __str__(self) -> str:
        marks = {"ok": "ok   ", "note": "note ", "error": "ERROR"}
        lines = []
        for finding in self.findings:
            lines.append(f"{marks[finding.level]} {finding.what}")
            lines += [f"      -> {line}" for line in finding.advice.splitlines()]
        return "\n".join(lines)


class _Stop(Exception):  # noqa: N818 - not an error of its own: the report holds the finding already
    pass


async def check_env(
    env_cls: type[BaseEnv],
    *,
    config: BaseEnvConfig | None = None,
    group_size: int | None = None,
    tokenizer_name: str | None = None,
    replies: Callable[[str], str] | Sequence[str] | None = None,
    evaluate: bool = False,
    timeout_s: float = 60.0,
) -> Report:
    """Make one group with ``env_cls`` and check everything on the way.

    Example:
        report = await check_env(MyEnv, replies=["<answer>3</answer>", "wrong"])
        assert report.ok, report
    """
    report = Report()
    with tempfile.TemporaryDirectory(prefix="check_env_") as folder:
        try:
            env = _construct(env_cls, report, Path(folder), config, group_size, tokenizer_name)
            server = script(env, replies or DEFAULT_REPLIES)
            report.prompts = server.prompts
            await _call(
                report, "setup()", env.setup(), timeout_s, "setup() loads data; without a network give it a local file"
            )
            item = await _call(
                report, "get_next_item()", env.get_next_item(), timeout_s, "return one item, or None when there is none"
            )
            _check_item(report, item)
            result = await _collect(report, env, item, timeout_s)
            for group in _groups_of(report, result):
                check_group_data(report, group, env)
                report.group = group
            if not server.prompts:
                report.add(
                    "note", "the model was never asked", "a rollout should call self.server or a managed_server session"
                )
            await _check_blocking(report, env, item, timeout_s)
            if evaluate:
                await _call(report, "evaluate()", env.evaluate(), timeout_s, "evaluate() runs on the current policy")
        except _Stop:
            pass
    return report


def _construct(
    env_cls: Any,
    report: Report,
    folder: Path,
    config: BaseEnvConfig | None,
    group_size: int | None,
    tokenizer_name: str | None,
) -> BaseEnv:
    if not (inspect.isclass(env_cls) and issubclass(env_cls, BaseEnv)):
        report.add("error", f"{env_cls!r} is not a subclass of BaseEnv", "class MyEnv(BaseEnv): ...")
        raise _Stop
    if missing := sorted(getattr(env_cls, "__abstractmethods__", ())):
        report.add(
            "error",
            f"{env_cls.__name__} does not define {', '.join(missing)}",
            "\n".join(f"async def {name}(self): ..." for name in missing),
        )
        raise _Stop
    for name in ("setup", "get_next_item", "collect_trajectory", "collect_trajectories", "evaluate"):
        if not inspect.iscoroutinefunction(getattr(env_cls, name)):
            report.add("error", f"{name}() is not a coroutine", f"write: async def {name}(...)")
            raise _Stop
    own = (
        env_cls.collect_trajectory is not BaseEnv.collect_trajectory,
        env_cls.collect_trajectories is not BaseEnv.collect_trajectories,
    )
    if not any(own):
        report.add(
            "error",
            "neither collect_trajectory() nor collect_trajectories() is defined",
            "define one of them: it makes and scores rollouts",
        )
        raise _Stop
    try:
        defaults, _ = env_cls.config_init()
        settings = config or defaults
        settings.use_wandb, settings.data_path_to_save_groups, settings.data_dir_to_save_evals = False, None, None
        settings.group_size = group_size or settings.group_size
        settings.tokenizer_name = tokenizer_name or str(make_tiny_tokenizer(folder / "tokenizer"))
        env = env_cls(config=settings, server_configs=[], slurm=False, testing=True)
    except Exception as error:  # whatever a user's constructor raises is the finding
        _failed(
            report,
            "construction",
            error,
            "config_init() returns (config, servers); __init__ takes (config, server_configs, slurm, testing)",
        )
        raise _Stop from error
    report.add("ok", f"{env_cls.__name__} can be constructed (group_size {settings.group_size})")
    return env


def _failed(report: Report, stage: str, error: BaseException, advice: str) -> None:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/atroposlib/" not in frame.filename]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, ModuleNotFoundError):
        advice = PACKAGE_ADVICE
    report.add("error", f"{stage} raised {type(error).__name__}: {error}{place}", advice)


async def _call(report: Report, stage: str, work: Awaitable[Any], timeout_s: float, advice: str) -> Any:
    """Await user code with a time limit; what goes wrong is a finding and ends the check."""
    started = time.perf_counter()
    try:
        result = await asyncio.wait_for(work, timeout_s)
    except TimeoutError as error:
        report.add("error", f"{stage} did not finish within {timeout_s:g} s", advice)
        raise _Stop from error
    except Exception as error:  # user code: what it raises is the finding
        _failed(report, stage, error, advice)
        raise _Stop from error
    report.add("ok", f"{stage} took {time.perf_counter() - started:.2f} s")
    return result


async def _check_blocking(report: Report, env: BaseEnv, item: Any, timeout_s: float) -> None:
    """Make the group once more, now that everything is imported, and note calls that hold up all other rollouts."""
    try:
        stall_s = await _longest_stall(asyncio.wait_for(env.collect_trajectories(item), timeout_s))
    except Exception as error:  # user code that works once and not twice
        _failed(report, "collect_trajectories(), a second time,", error, "an item may be tried again: do not use it up")
        raise _Stop from error
    if stall_s > _LONGEST_STALL_S:
        advice = "run slow code in a thread: await asyncio.to_thread(...)"
        report.add("note", f"collect_trajectories() blocks the event loop for {stall_s:.1f} s", advice)


async def _longest_stall(work: Awaitable[Any]) -> float:
    """Await ``work`` and return for how long at most it kept the event loop from running."""
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_WATCH_INTERVAL_S)
            worst = max(worst, time.perf_counter() - before - _WATCH_INTERVAL_S)

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)
    try:
        await work
    finally:
        await asyncio.sleep(_WATCH_INTERVAL_S)
        watcher.cancel()
    return worst


def _check_item(report: Report, item: Any) -> None:
    if item is None:
        report.add(
            "error",
            "get_next_item() returned None at once",
            "None means there is nothing now; an environment that starts so never runs",
        )
        raise _Stop
    try:
        json.dumps(item)
    except (TypeError, ValueError):
        report.add(
            "note", f"items are {type(item).__name__} and not JSON", "plain data survives a restart and can be logged"
        )


async def _collect(report: Report, env: BaseEnv, item: Any, timeout_s: float) -> Any:
    result = await _call(
        report,
        "collect_trajectories()",
        env.collect_trajectories(item),
        timeout_s,
        "it makes group_size rollouts of one item and scores them",
    )
    if not (isinstance(result, tuple) and len(result) == 2):
        report.add(
            "error",
            f"collect_trajectories() returned {type(result).__name__}, not a pair",
            "return group, []  (the group and items for the backlog)",
        )
        raise _Stop
    if not result[0] or type(env).postprocess_histories is BaseEnv.postprocess_histories:
        return result[0]
    return await _call(
        report,
        "postprocess_histories()",
        postprocess(env, result[0]),
        timeout_s,
        "it gets what collect_trajectories() made and returns it, changed or not, or None to drop it",
    )


def _groups_of(report: Report, result: Any) -> list[dict[str, Any]]:
    groups = result if isinstance(result, list) else [result]
    kept = [group for group in groups if group is not None]
    if not kept:
        report.add(
            "note",
            "the group was given up (None)",
            "fine when the replies were bad; try others with replies=... or --reply",
        )
    for group in kept:
        if not isinstance(group, Mapping):
            report.add(
                "error",
                f"a group is {type(group).__name__}, not a dict",
                "fill a ScoredDataGroup: tokens, masks, scores",
            )
            raise _Stop
    return [dict(group) for group in kept]


# ---------------------------------------------------------------------- the group


def check_group_data(report: Report, group: Mapping[str, Any], env: Any) -> None:
    """Check a finished group as trainer and rollout server will."""
    lacking = [key for key in ("tokens", "masks", "scores") if not isinstance(group.get(key), list)]
    if lacking:
        report.add(
            "error",
            f"the group lacks {', '.join(lacking)}",
            "every group needs tokens, masks and scores, one entry per rollout",
        )
        return
    _check_size(report, group, env.config.group_size)
    _check_scores(report, group["scores"])
    for index, (tokens, masks) in enumerate(zip(group["tokens"], group["masks"], strict=False)):
        if not _check_sequence(report, index, tokens, masks, group):
            break
    else:
        trained = [sum(mask != -100 for mask in masks) for masks in group["masks"]]
        report.add("ok", f"{len(trained)} sequences, trained tokens each: {', '.join(map(str, trained))}")
    if not group.get("inference_logprobs"):
        report.add(
            "note",
            "the group has no inference_logprobs",
            "with them the trainer can correct for stale samples: use managed_server and scored_item",
        )


def _check_size(report: Report, group: Mapping[str, Any], group_size: int) -> None:
    wanted = int((group.get("group_overrides") or {}).get("group_size", group_size))
    sizes = {key: len(group[key]) for key in ("tokens", "masks", "scores")}
    if set(sizes.values()) != {wanted}:
        report.add(
            "error",
            f"a group of {wanted} is wanted, this one has {sizes}",
            "one entry per rollout in every list; another size needs group_overrides['group_size']",
        )


def _check_scores(report: Report, scores: Sequence[Any]) -> None:
    wrong = [score for score in scores if not isinstance(score, int | float) or not math.isfinite(score)]
    if wrong:
        report.add(
            "error",
            f"scores must be finite numbers, found {wrong[:3]}",
            "a rollout that could not be scored belongs in no group: drop or repeat it",
        )
    elif len(set(scores)) == 1:
        report.add(
            "note",
            f"all scores are {scores[0]}",
            "such groups teach nothing and are dropped; give replies that should score differently (--reply TEXT, several times)",
        )
    else:
        report.add("ok", f"scores {', '.join(f'{score:.3g}' for score in scores)}")


def _check_sequence(report: Report, index: int, tokens: Any, masks: Any, group: Mapping[str, Any]) -> bool:
    """The first thing wrong with one sequence; True when nothing is."""
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        report.add(
            "error",
            f"tokens of rollout {index} are {type(tokens).__name__}, not a list of ints",
            "use tokenize_for_trainer, or nodes of managed_server",
        )
    elif len(tokens) != len(masks):
        report.add(
            "error",
            f"rollout {index} has {len(tokens)} tokens but {len(masks)} mask entries",
            "masks run parallel to tokens: the token id where trained, else -100",
        )
    elif any(mask not in (-100, token) for token, mask in zip(tokens, masks, strict=True)):
        report.add(
            "error",
            f"masks of rollout {index} hold something other than -100 or the token id",
            "mask = token id where trained, -100 elsewhere (0 and 1 are not masks)",
        )
    elif all(mask == -100 for mask in masks):
        report.add(
            "error", f"rollout {index} has nothing to train: every mask is -100", "unmask the model's own tokens"
        )
    elif -100 not in masks:
        report.add(
            "error", f"rollout {index} trains on its prompt: no mask is -100", "mask what the model was given with -100"
        )
    elif not _logprobs_fit(group, index, len(tokens)):
        report.add(
            "error",
            f"inference_logprobs of rollout {index} do not match its {len(tokens)} tokens",
            "one log-prob per token: real where trained, 1.0 elsewhere",
        )
    else:
        return True
    return False


def _logprobs_fit(group: Mapping[str, Any], index: int, length: int) -> bool:
    logprobs = group.get("inference_logprobs")
    return not logprobs or (index < len(logprobs) and len(logprobs[index]) == length)
