"""A two-turn environment of the older verifiers API: load_environment, a data set and a rubric."""

import re

import verifiers as vf
from datasets import Dataset


class TwoTurns(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Another one."}]


def last_code(completion, **kwargs) -> float:
    """The number in the model's last reply: a reward that betrays whose reply it was computed from."""
    last = completion[-1]
    content = last["content"] if isinstance(last, dict) else last.content
    return float(re.findall(r"code-(\d+)", str(content))[-1])


def load_environment(num_tasks: int = 8) -> vf.Environment:
    rows = [{"question": f"Task {number}: say a code.", "answer": str(number)} for number in range(num_tasks)]
    return TwoTurns(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[last_code]), max_turns=2)
