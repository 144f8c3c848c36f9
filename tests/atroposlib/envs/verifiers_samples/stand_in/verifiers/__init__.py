"""The part of the older verifiers API the worker uses, small enough to run without the package installed."""

import asyncio
import importlib
import uuid

from verifiers.rubrics.rubric import Rubric

__version__ = "stand-in"


class Environment:
    def __init__(self, dataset, rubric, max_turns=1):
        self.dataset, self.rubric, self.max_turns = dataset, rubric, max_turns

    def get_dataset(self):
        return self.dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})

    async def run_group(self, inputs, client, model, sampling_args, state_columns=()):
        states = await asyncio.gather(*(self._rollout(one, client, model, sampling_args) for one in inputs))
        for state in states:
            scores = [await self.rubric._call_individual_reward_func(func, state) for func in self.rubric.funcs]
            state["reward"] = sum(scores)
        columns = ("reward", "metrics", "error", *state_columns)
        return [{name: state.get(name) for name in columns} for state in states]

    async def _rollout(self, one, client, model, sampling_args):
        state = {
            "trajectory_id": uuid.uuid4().hex,
            "completion": [],
            "metrics": {"turns": float(self.max_turns)},
            "error": None,
        }
        messages = list(one["prompt"])
        for turn in range(self.max_turns):
            headers = {name: state[field] for name, field in client.config.extra_headers_from_state.items()}
            reply = await client.api.chat.completions.create(
                model=model, messages=messages, extra_headers=headers, **sampling_args
            )
            state["completion"].append({"role": "assistant", "content": reply.choices[0].message.content})
            messages = [*one["prompt"], *state["completion"]]
            if turn + 1 < self.max_turns:
                state["completion"] += await self.env_response(messages, state)
                messages = [*one["prompt"], *state["completion"]]
        return state

    async def _teardown(self):
        return None


class MultiTurnEnv(Environment):
    pass


def load_environment(name, **arguments):
    return importlib.import_module(name.replace("-", "_")).load_environment(**arguments)


__all__ = ["Environment", "MultiTurnEnv", "Rubric", "load_environment"]
