"""The environment checker: says what is wrong, and nothing about what is right."""

from __future__ import annotations

import time
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.scored_rollout import scored_item
from atroposlib.testing.env_checker import Report, check_env


class Good(BaseEnv):
    """Longer answers score more."""

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return BaseEnvConfig(group_size=2), []

    async def setup(self) -> None: ...

    async def get_next_item(self) -> Any:
        return {"question": "hi"}

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=[{"role": "user", "content": item["question"]}], max_tokens=50
            )
            node = managed.get_state()["nodes"][0]
        return self.finish(scored_item(node, float(len(reply.choices[0].message.content)))), []

    def finish(self, rollout: dict[str, Any]) -> Any:
        return rollout

    async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...


async def findings(env_cls: Any, **kwargs: Any) -> Report:
    return await check_env(env_cls, **kwargs)


def broken(**changes: Any) -> type[BaseEnv]:
    """``Good`` with methods replaced."""
    return type("Broken", (Good,), changes)


async def test_a_good_environment_has_no_findings() -> None:
    report = await findings(Good, evaluate=True)
    assert report.ok
    assert {finding.level for finding in report.findings} == {"ok"}, str(report)
    assert report.group is not None
    assert report.prompts[0] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def finish_with(**update: Any) -> Any:
    def finish(self: Any, rollout: dict[str, Any]) -> dict[str, Any]:
        return {**rollout, **{key: value(rollout) if callable(value) else value for key, value in update.items()}}

    return finish


@pytest.mark.parametrize(
    ("finish", "message"),
    [
        (finish_with(masks=lambda r: [-100] * len(r["tokens"])), "nothing to train"),
        (finish_with(masks=lambda r: r["tokens"]), "trains on its prompt"),
        (finish_with(masks=lambda r: [int(m != -100) for m in r["masks"]]), "something other than -100"),
        (finish_with(masks=lambda r: r["masks"][:-1]), "mask entries"),
        (finish_with(tokens=lambda r: {"input_ids": r["tokens"]}), "not a list of ints"),
        (finish_with(scores=float("nan")), "finite numbers"),
        (finish_with(scores=None), "finite numbers"),
        (finish_with(inference_logprobs=lambda r: r["inference_logprobs"][1:]), "do not match"),
    ],
)
async def test_wrong_groups_are_explained(finish: Any, message: str) -> None:
    report = await findings(broken(finish=finish))
    assert not report.ok
    assert message in str(report)


async def test_equal_scores_and_missing_logprobs_are_notes() -> None:
    report = await findings(broken(finish=finish_with(scores=1.0, inference_logprobs=None)))
    assert report.ok
    assert "all scores are 1.0" in str(report)
    assert "no inference_logprobs" in str(report)


async def async_none(self: Any) -> None:
    return None


async def raise_in_setup(self: Any) -> None:
    raise FileNotFoundError("train.jsonl")


async def sleep_long(self: Any, item: Any) -> Any:
    import asyncio

    await asyncio.sleep(30)


async def bare_group(self: Any, item: Any) -> Any:
    return {"tokens": [[1]], "masks": [[1]], "scores": [1.0]}


async def no_group(self: Any, item: Any) -> Any:
    return None, []


async def wrong_size(self: Any, item: Any) -> Any:
    return {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0]}, []


async def blocking(self: Any, item: Any) -> Any:
    time.sleep(1.3)
    return await Good.collect_trajectories(self, item)


@pytest.mark.parametrize(
    ("changes", "level", "message"),
    [
        ({"get_next_item": async_none}, "error", "returned None at once"),
        ({"setup": raise_in_setup}, "error", "FileNotFoundError: train.jsonl at "),
        ({"setup": lambda self: None}, "error", "setup() is not a coroutine"),
        ({"collect_trajectories": sleep_long}, "error", "did not finish within 2 s"),
        ({"collect_trajectories": bare_group}, "error", "not a pair"),
        ({"collect_trajectories": no_group}, "note", "given up"),
        ({"collect_trajectories": wrong_size}, "error", "a group of 2 is wanted"),
        ({"collect_trajectories": blocking}, "note", "blocks the event loop"),
        ({"collect_trajectory": BaseEnv.collect_trajectory}, "error", "neither collect_trajectory"),
        ({"config_init": classmethod(lambda cls: 5)}, "error", "construction raised"),
    ],
)
async def test_wrong_hooks_are_explained(changes: dict[str, Any], level: str, message: str) -> None:
    report = await findings(broken(**changes), timeout_s=2.0)
    assert any(finding.level == level and message in finding.what for finding in report.findings), str(report)
    assert all(finding.advice for finding in report.findings if finding.level != "ok")


async def test_the_last_look_at_a_group_is_checked_as_it_will_be_called() -> None:
    async def postprocess(self: Any, group: Any) -> Any:
        return group["no such key"]

    def plain(self: Any, group: Any) -> Any:
        return group["no such key"]

    for hook in (postprocess, plain):
        report = await findings(broken(postprocess_histories=hook))
        assert not report.ok
        assert "postprocess_histories() raised KeyError: 'no such key'" in str(report)
    assert (await findings(broken(postprocess_histories=lambda self, group: group))).ok
    assert (await findings(broken(postprocess_histories=postprocess, collect_trajectories=no_group))).ok


async def test_missing_methods_and_strangers() -> None:
    class Half(BaseEnv):
        async def get_next_item(self) -> Any: ...

    assert "does not define evaluate" in str(await findings(Half))
    assert "not a subclass" in str(await findings(int))
