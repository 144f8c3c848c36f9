"""Runs a ``verifiers`` environment in a process and virtual environment of its own. Started by ``verifiers_env``.

This file is executed by the other environment's Python: it imports the standard library and ``verifiers`` only. Requests
come as JSON lines on standard input, replies go as JSON lines to the file descriptor named by ``--reply-fd``; what the
environment prints goes to standard error. Every model call carries ``X-Session-ID``, the id of its rollout. A worker that
cannot start says why in its first reply and ends.

    {"id": 1, "op": "info"}                                             -> {"id": 1, "result": {"num_tasks": 100, ...}}
    {"id": 2, "op": "group", "index": 7, "n": 4, "sampling": {...}}     -> {"id": 2, "result": [rollout, ...]}

A rollout is ``{"session", "reward", "error", "metrics", "agent"}``; ``error`` is None exactly when ``reward`` counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import importlib
import itertools
import json
import os
import sys
import threading
import traceback
from typing import Any, TextIO

REWARD_ERROR = "atropos_reward_error"
API_KEY_VARIABLE = "ATROPOS_ROLLOUT_KEY"  # the proxy's path holds the secret; clients insist on some key


class StartError(Exception):
    """The environment cannot be run here; one line that says why and what to do."""


class CurrentEnvironment:
    """An environment of the current API: tasksets, harnesses, traces (``verifiers.v1``)."""

    api = "v1"

    def __init__(self, name: str, arguments: dict[str, Any], endpoint: dict[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self.endpoint = endpoint
        self.env = load_environment(resolve_env_config(_with_defaults(name, arguments, endpoint)))
        self._tasks: list[Any] = []
        taskset = self.env.taskset
        self._source = iter(taskset if hasattr(taskset, "__iter__") else taskset.load())
        self._bounded = bool(getattr(taskset, "bounded", not getattr(taskset, "INFINITE", False)))
        if self._bounded:
            self._tasks = list(self._source)
        self._open = contextlib.AsyncExitStack()

    async def start(self) -> None:
        await self._open.enter_async_context(self.env.serving())

    async def stop(self) -> None:
        await self._open.aclose()

    def num_tasks(self, split: str) -> int | None:
        return len(self._tasks) if self._bounded else None

    def task(self, index: int) -> Any:
        if not self._bounded and index >= len(self._tasks):
            self._tasks += itertools.islice(self._source, index + 1 - len(self._tasks))
        return self._tasks[index % len(self._tasks)]

    async def group(self, index: int, n: int, split: str, sampling: dict[str, Any]) -> list[dict[str, Any]]:
        import verifiers.v1 as vf

        client = vf.EvalClientConfig(base_url=self.endpoint["base_url"], api_key_var=API_KEY_VARIABLE)
        context = vf.ModelContext(client=client, model=self.endpoint["model"], sampling=vf.SamplingConfig(**sampling))
        slots = self.env.slots(self.task(index), n)
        episodes = await asyncio.gather(*(self.env.run_slot(slot, context) for slot in slots))
        return [rollout for episode in episodes for rollout in self._rollouts(episode)]

    @staticmethod
    def _rollouts(episode: Any) -> list[dict[str, Any]]:
        problems = [f"{error.type}: {error.message}" for error in episode.errors] if not episode.ok else []
        if not episode.traces:
            return [_rollout("", None, "; ".join(problems) or "the episode has no trace", {}, "")]
        return [CurrentEnvironment._one(trace, problems) for trace in episode.traces]

    @staticmethod
    def _one(trace: Any, problems: list[str]) -> dict[str, Any]:
        own = [f"{error.type}: {error.message}" for error in trace.errors] if not trace.ok else []
        unscored = [name for name, reward in trace.rewards.items() if reward is None]
        error = "; ".join(own or ([] if trace.ok else problems or ["the trace did not complete"]))
        if not error and (unscored or not trace.rewards):
            error = f"not scored: {', '.join(unscored) or 'the task has no reward'}"
        values = {name: value for name, value in trace.metrics.items() if value is not None}
        values |= {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return _rollout(trace.id, None if error else float(trace.reward), error or None, values, _agent_name(trace))


class OlderEnvironment:
    """An environment of the older API: ``load_environment`` and rubrics (last in 0.3.1)."""

    api = "legacy"

    def __init__(self, name: str, arguments: dict[str, Any], endpoint: dict[str, Any]) -> None:
        import verifiers

        _mark_failed_rewards()
        self.endpoint = endpoint
        self.env = verifiers.load_environment(name, **arguments)
        self._data: dict[str, Any] = {}
        self._client: Any = None

    async def start(self) -> None:
        from verifiers.clients import resolve_client
        from verifiers.types import ClientConfig

        self._client = resolve_client(
            ClientConfig(
                api_base_url=self.endpoint["base_url"],
                api_key_var=API_KEY_VARIABLE,
                extra_headers_from_state={"X-Session-ID": "trajectory_id"},
                max_retries=2,
            )
        )

    async def stop(self) -> None:
        try:
            await self.env._teardown()
        except Exception:  # foreign code; the work is done, but what it leaves behind is for the user to see
            traceback.print_exc()

    def rows(self, split: str) -> Any:
        if split not in self._data:
            has_eval = (
                getattr(self.env, "eval_dataset", None) is not None
                or getattr(self.env, "eval_dataset_source", None) is not None
            )
            self._data[split] = self.env.get_eval_dataset() if split == "eval" and has_eval else self.env.get_dataset()
        return self._data[split]

    def num_tasks(self, split: str) -> int | None:
        return len(self.rows(split))

    async def group(self, index: int, n: int, split: str, sampling: dict[str, Any]) -> list[dict[str, Any]]:
        rows = self.rows(split)
        inputs = [dict(rows[index % len(rows)]) for _ in range(n)]
        outputs = await self.env.run_group(
            inputs, self._client, self.endpoint["model"], sampling, state_columns=["trajectory_id", REWARD_ERROR]
        )
        return [self._one(output) for output in outputs]

    @staticmethod
    def _one(output: Any) -> dict[str, Any]:
        problem, reward = output.get("error"), output.get("reward")
        error = (
            None
            if not problem
            else str(problem.get("error_chain_str") or problem)
            if isinstance(problem, dict)
            else str(problem)
        )
        if error is None and (reward is None or output.get(REWARD_ERROR)):
            error = f"not scored: {output.get(REWARD_ERROR) or 'no reward'}"
        values = {name: float(value) for name, value in (output.get("metrics") or {}).items() if value is not None}
        session = str(output.get("trajectory_id") or "")
        return _rollout(session, None if error else float(reward), error, values, "")


def _mark_failed_rewards() -> None:
    """Make rubrics remember that a reward function raised: they log it and go on with a reward of 0.0."""
    from verifiers.rubrics import rubric as module

    call_function = module.maybe_await
    call_individual, call_group = module.Rubric._call_individual_reward_func, module.Rubric._call_group_reward_func
    current: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("reward_errors", default=None)

    async def maybe_await(function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await call_function(function, *args, **kwargs)
        except Exception as error:  # foreign reward code: noted here, raised again for the rubric to handle
            errors = current.get()
            if errors is not None:
                errors.append(f"{getattr(function, '__name__', 'reward')} raised {type(error).__name__}: {error}")
            raise

    async def remembering(call: Any, rubric: Any, function: Any, states: list[Any], argument: Any) -> Any:
        errors: list[str] = []
        token = current.set(errors)
        try:
            return await call(rubric, function, argument)
        finally:
            current.reset(token)
            for state in states if errors else []:
                state[REWARD_ERROR] = "; ".join(errors)

    async def individual(self: Any, func: Any, state: Any) -> Any:
        return await remembering(call_individual, self, func, [state], state)

    async def group(self: Any, func: Any, states: list[Any]) -> Any:
        return await remembering(call_group, self, func, states, states)

    module.maybe_await = maybe_await
    module.Rubric._call_individual_reward_func, module.Rubric._call_group_reward_func = individual, group


def _rollout(
    session: str, reward: float | None, error: str | None, metrics: dict[str, Any], agent: str
) -> dict[str, Any]:
    return {"session": session, "reward": reward, "error": error, "metrics": metrics, "agent": agent}


def _agent_name(trace: Any) -> str:
    return str(getattr(trace.agent, "name", None) or "")


def _with_defaults(name: str, arguments: dict[str, Any], endpoint: dict[str, Any]) -> dict[str, Any]:
    """The environment's configuration: the user's, plus taskset id, runtime and harness where he left them open."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type

    config = {key: value for key, value in arguments.items() if key != "taskset"}
    config["taskset"] = {"id": name, **(arguments.get("taskset") or {})}
    fields = env_config_type(name, str(config.get("id") or "")).model_fields
    for role in [key for key, field in fields.items() if isinstance(field.default, AgentConfig)]:
        seat = dict(config.get(role) or {})
        if endpoint.get("runtime"):
            seat.setdefault("runtime", {"type": endpoint["runtime"]})
        if endpoint.get("harness"):
            seat.setdefault("harness", {"id": endpoint["harness"]})
        config[role] = seat
    return config


def load(name: str, arguments: dict[str, Any], endpoint: dict[str, Any], api: str) -> Any:
    """The environment under the API it was written for: a module with ``load_environment`` is of the older kind."""
    try:
        import verifiers  # noqa: F401
    except ImportError as error:
        raise StartError(
            f"{sys.executable} cannot import verifiers ({error}); install it there, or name another with --python"
        ) from error
    kinds = {"v1": CurrentEnvironment, "legacy": OlderEnvironment}
    try:
        if api == "auto":
            api = "legacy" if _is_older(name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")) else "v1"
        return kinds[api](name, arguments, endpoint)
    except Exception as error:  # foreign code
        raise StartError(
            f"{sys.executable} cannot load the verifiers environment {name!r}: {_said(error)}; "
            "check its name and --args, install it there, or name another Python with --python"
        ) from error


def _said(error: Exception) -> str:
    """An exception on one line, with the place it comes from."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({place.filename}, line {place.lineno})"


def _is_older(module_name: str) -> bool:
    """Whether the environment's module offers ``load_environment`` to a package that still has that API."""
    import verifiers

    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        return False  # one of the task sets that come with the package
    return hasattr(module, "load_environment") and hasattr(verifiers, "load_environment")


class Worker:
    """Reads requests, runs them side by side, writes replies."""

    def __init__(self, environment: Any, replies: TextIO) -> None:
        self.environment = environment
        self._out = replies
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        try:
            await self.environment.start()
        except Exception as error:  # foreign code
            raise StartError(f"the verifiers environment cannot start: {_said(error)}") from error
        requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        threading.Thread(target=_read_requests, args=(loop, requests), daemon=True).start()
        try:
            while (request := await requests.get()) is not None:
                task = asyncio.create_task(self.answer(request))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await self.environment.stop()

    async def answer(self, request: dict[str, Any]) -> None:
        try:
            reply = {"id": request["id"], "result": await self.execute(request)}
        except Exception as error:  # the environment is foreign code; its failure is the answer to this request only
            traceback.print_exc()
            reply = {"id": request["id"], "error": f"{type(error).__name__}: {error}"}
        self._out.write(json.dumps(reply) + "\n")
        self._out.flush()

    async def execute(self, request: dict[str, Any]) -> Any:
        if request["op"] == "info":
            splits = {split: self.environment.num_tasks(split) for split in ("train", "eval")}
            return {
                "api": self.environment.api,
                "num_tasks": splits["train"],
                "num_eval_tasks": splits["eval"],
                "version": _version(),
            }
        if request["op"] == "group":
            return await self.environment.group(request["index"], request["n"], request["split"], request["sampling"])
        raise ValueError(f"unknown request {request['op']!r}")


def _version() -> str:
    import verifiers

    return str(getattr(verifiers, "__version__", "unknown"))


def _read_requests(loop: asyncio.AbstractEventLoop, requests: asyncio.Queue[dict[str, Any] | None]) -> None:
    """In a thread: one request per line; the end of input is the end of the worker."""
    for line in sys.stdin:
        if line.strip():
            loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
    loop.call_soon_threadsafe(requests.put_nowait, None)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--env", required=True)
    parser.add_argument("--arguments", default="{}")
    parser.add_argument("--endpoint", required=True, help="JSON: base_url, model, runtime, harness")
    parser.add_argument("--api", choices=("auto", "v1", "legacy"), default="auto")
    parser.add_argument("--reply-fd", type=int, required=True)
    given = parser.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [
        os.getcwd(),
        *(path for path in sys.path if os.path.abspath(path) != here),
    ]  # our neighbours are not its modules
    os.environ.setdefault(API_KEY_VARIABLE, "not-needed")
    os.dup2(2, 1)  # prints of the environment must not look like anything of ours
    with os.fdopen(given.reply_fd, "w", encoding="utf-8", buffering=1) as replies:
        try:
            environment = load(given.env, json.loads(given.arguments), json.loads(given.endpoint), given.api)
            asyncio.run(Worker(environment, replies).run())
        except StartError as error:
            request = json.loads(sys.stdin.readline() or "{}")
            reply = {"id": request.get("id"), "error": str(error), "traceback": traceback.format_exc()}
            replies.write(json.dumps(reply) + "\n")
            sys.exit(1)


if __name__ == "__main__":
    main()
