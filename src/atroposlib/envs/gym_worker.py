"""Holds gymnasium environments in a process and virtual environment of their own. Started by ``gym_env``.

This file is executed by the other environment's Python: it imports the standard library, numpy and ``gymnasium`` only.
Requests come as JSON lines on standard input, replies go to the file descriptor named by ``--reply-fd``. A worker that cannot
start says why in its first reply and ends.

    {"id": 1, "op": "info"}                                        -> {"id": 1, "result": {"action_kind": "discrete", ...}}
    {"id": 2, "op": "reset", "seed": 7}                            -> {"id": 2, "result": {"episode": 1, "text": "..."}}
    {"id": 3, "op": "step", "episode": 1, "action": "2"}           -> {"id": 3, "result": {"text", "reward", "done", "valid"}}
    {"id": 4, "op": "close", "episode": 1}                         -> {"id": 4, "result": null}
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

_CONTROL = re.compile(r"\x1b\[[0-9;]*m")


class StartError(Exception):
    """There is no such environment here; one line that says what to do."""


class Games:
    """Open episodes of one environment id, observations and actions as text."""

    def __init__(self, env_id: str, arguments: dict[str, Any], action_names: list[str]) -> None:
        self.env_id, self.arguments = env_id, arguments
        self._episodes: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        first = self._make()
        self.action_names = action_names or self._known_action_names(first)
        self.kind = type(first.action_space).__name__.lower()
        self.action_space = str(first.action_space)
        first.close()

    def _make(self) -> Any:
        import gymnasium

        arguments = dict(self.arguments)
        if "ansi" in _render_modes(gymnasium.spec(self.env_id)):
            arguments.setdefault("render_mode", "ansi")
        return gymnasium.make(self.env_id, **arguments)

    @staticmethod
    def _known_action_names(env: Any) -> list[str]:
        meanings = getattr(env.unwrapped, "get_action_meanings", None)
        return [str(name) for name in meanings()] if callable(meanings) else []

    def info(self) -> dict[str, Any]:
        return {"action_kind": self.kind, "action_space": self.action_space, "action_names": self.action_names}

    def reset(self, seed: int) -> dict[str, Any]:
        env = self._make()
        observation, info = env.reset(seed=seed)
        episode = next(self._numbers)
        self._episodes[episode] = env
        return {"episode": episode, "text": self._text(env, observation, info)}

    def step(self, episode: int, action: str) -> dict[str, Any]:
        env = self._episodes[episode]
        try:
            chosen = self._action(env, action)
        except (ValueError, TypeError) as error:
            return {"text": f"That is not a valid action: {error}", "reward": 0.0, "done": False, "valid": False}
        observation, reward, terminated, truncated, info = env.step(chosen)
        text = self._text(env, observation, info)
        return {"text": text, "reward": float(reward), "done": bool(terminated or truncated), "valid": True}

    def close(self, episode: int) -> None:
        env = self._episodes.pop(episode, None)
        if env is not None:
            env.close()

    def _action(self, env: Any, text: str) -> Any:
        wanted = text.strip()
        if self.kind == "text":
            return wanted
        names = [name.lower() for name in self.action_names]
        value = names.index(wanted.lower()) if wanted.lower() in names else json.loads(wanted)
        if self.kind != "discrete":
            import numpy

            value = numpy.asarray(value, dtype=env.action_space.dtype)
        elif isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{wanted!r} is no whole number")
        if not env.action_space.contains(value):
            raise ValueError(f"{wanted!r} is not in {self.action_space}")
        return value

    @staticmethod
    def _text(env: Any, observation: Any, info: dict[str, Any]) -> str:
        if isinstance(observation, str):
            return observation
        drawn = env.render() if env.render_mode == "ansi" else None
        shown = _CONTROL.sub("", drawn).strip() if isinstance(drawn, str) else json.dumps(_plain(observation))
        mask = _plain(info.get("action_mask")) if isinstance(info, dict) else None
        return (
            f"{shown}\nActions that change something: {[i for i, usable in enumerate(mask) if usable]}"
            if mask
            else shown
        )


def _render_modes(spec: Any) -> list[str]:
    import importlib

    entry = spec.entry_point
    if isinstance(entry, str):
        module, _, name = entry.partition(":")
        entry = getattr(importlib.import_module(module), name)
    return list((getattr(entry, "metadata", None) or {}).get("render_modes", []))


def _plain(value: Any) -> Any:
    """numpy values, tuples and dicts as JSON knows them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def answer(games: Games, request: dict[str, Any]) -> dict[str, Any]:
    """Execute one request."""
    operations: dict[str, Callable[..., Any]] = {
        "info": games.info,
        "reset": games.reset,
        "step": games.step,
        "close": games.close,
    }
    fields = {key: value for key, value in request.items() if key not in ("id", "op")}
    try:
        return {"id": request["id"], "result": operations[request["op"]](**fields)}
    except Exception as error:  # the environment is foreign code; its failure is the answer to this request only
        traceback.print_exc()
        return {"id": request["id"], "error": f"{type(error).__name__}: {error}"}


def load(env_id: str, arguments: dict[str, Any], action_names: list[str], module: str | None) -> Games:
    """Find the environment; ``StartError`` when there is none of that name or it cannot be made."""
    if module:
        try:
            __import__(module)
        except Exception as error:  # foreign code
            raise StartError(f"--module {module!r} cannot be imported by {sys.executable}: {_said(error)}") from error
    try:
        import gymnasium
    except ImportError as error:
        raise StartError(
            f"{sys.executable} cannot import gymnasium ({error}); install it there, or name another with --python"
        ) from error
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(env_id, list(gymnasium.registry), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "gymnasium.pprint_registry() lists what there is."
        raise StartError(
            f"gymnasium has no environment {env_id!r}; {hint} One of your own is registered by the module --module names"
        ) from error
    try:
        return Games(env_id, arguments, action_names)
    except Exception as error:  # foreign code
        raise StartError(
            f"gymnasium.make({env_id!r}) fails with the arguments {json.dumps(arguments)}: {_said(error)}"
        ) from error


def _said(error: Exception) -> str:
    """An exception on one line, with the place it comes from."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({place.filename}, line {place.lineno})"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--env", required=True)
    parser.add_argument("--arguments", default="{}")
    parser.add_argument("--actions", default="[]", help="JSON: names of the discrete actions")
    parser.add_argument("--import-module", help="a module that registers the environment")
    parser.add_argument("--reply-fd", type=int, required=True)
    given = parser.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [
        os.getcwd(),
        *(path for path in sys.path if os.path.abspath(path) != here),
    ]  # our neighbours are not its modules
    os.dup2(2, 1)  # prints of the environment must not look like anything of ours
    with os.fdopen(given.reply_fd, "w", encoding="utf-8", buffering=1) as replies, contextlib.suppress(BrokenPipeError):
        try:
            games = load(given.env, json.loads(given.arguments), json.loads(given.actions), given.import_module)
        except StartError as error:
            request = json.loads(sys.stdin.readline() or "{}")
            reply = {"id": request.get("id"), "error": str(error), "traceback": traceback.format_exc()}
            replies.write(json.dumps(reply) + "\n")
            sys.exit(1)
        for line in sys.stdin:
            if line.strip():
                replies.write(json.dumps(answer(games, json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
