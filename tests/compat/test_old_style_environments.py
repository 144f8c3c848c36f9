"""Environments written the way public ones are: what they call, override and return must keep working."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs import env_cli, env_runner
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, OpenaiConfig, ScoredDataGroup, ServerBaseline
from atroposlib.errors import AtroposError
from atroposlib.testing.harness_server import HarnessServer
from atroposlib.type_definitions import Item
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from simple_env import RecordingClient, wait_until


class OldStyleEnv(BaseEnv):
    """Chat with n completions, tokenised afterwards, everything overridden that usually is."""

    name = "old_style"
    env_config_cls = BaseEnvConfig

    def __init__(self, config: BaseEnvConfig, server_configs: list[APIServerConfig], slurm=True, testing=False):  # type: ignore[no-untyped-def]
        super().__init__(config, server_configs, slurm, testing)
        self.percent_correct_buffer: list[float] = list()  # noqa: C408 - as they write it
        self.eval_metrics: list[tuple[str, float]] = list()  # noqa: C408
        self.rollouts_for_wandb = []
        self.completion_lengths = []

    async def setup(self):  # type: ignore[no-untyped-def]
        self.train = [f"question {number}" for number in range(50)]
        self.test = self.train[:6]
        self.iter = 0
        self.logged: list[dict[str, Any]] = []

    def save_checkpoint(self, step, data=None):  # type: ignore[no-untyped-def]
        if data is None:
            data = {}
        data["iter"] = self.iter
        super().save_checkpoint(step, data)

    async def wandb_log(self, wandb_metrics=None):  # type: ignore[no-untyped-def]
        if wandb_metrics is None:
            wandb_metrics = {}
        if self.percent_correct_buffer:
            wandb_metrics["train/percent_correct"] = sum(self.percent_correct_buffer) / len(self.percent_correct_buffer)
        self.percent_correct_buffer = []
        for key, value in self.eval_metrics:
            wandb_metrics[key] = value
        self.eval_metrics = []
        self.logged.append(dict(wandb_metrics))
        await super().wandb_log(wandb_metrics)

    async def rollout_and_score_eval(self, question: str) -> float:
        reply = await self.server.chat_completion(
            messages=[{"role": "user", "content": question}], n=1, max_tokens=16, temperature=0.0, split="eval"
        )
        return float(len(reply.choices[0].message.content) > 0)

    async def evaluate(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        scores = await asyncio.gather(*[self.rollout_and_score_eval(question) for question in self.test])
        self.eval_metrics.append(("eval/percent_correct", sum(scores) / len(scores)))

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": item}]
        completions = await self.server.chat_completion(
            messages=messages, n=self.config.group_size, max_tokens=self.config.max_token_length
        )
        scores = ScoredDataGroup()
        scores["tokens"] = list()  # noqa: C408
        scores["masks"] = list()  # noqa: C408
        scores["scores"] = list()  # noqa: C408
        for index, choice in enumerate(completions.choices):
            chat = (*messages, {"role": "assistant", "content": choice.message.content})
            out = tokenize_for_trainer(self.tokenizer, list(chat), finish_reason=choice.finish_reason)
            scores["tokens"].append(out["tokens"])
            scores["masks"].append(out["masks"])
            scores["scores"].append(1.0 if index % 2 else -1.0)
        for score in scores["scores"]:
            self.percent_correct_buffer.append(max(score, 0))
        return scores, []

    async def get_next_item(self) -> Item:
        next_item = self.train[self.iter % len(self.train)]
        self.iter += 1
        return next_item


class LoaderEnv(OldStyleEnv):
    """Makes no rollouts: sends data of its own at every step, as loaders of supervised data do."""

    async def add_train_workers(self):  # type: ignore[no-untyped-def]
        pass

    async def env_step_checks(self):  # type: ignore[no-untyped-def]
        if self.curr_step != self.status_dict["current_step"]:
            to_send = self.config.max_batches_offpolicy * self.config.batch_size - self.status_dict["queue_size"]
            for _ in range(min(to_send, 2)):
                group = ScoredDataGroup()
                ids = self.tokenizer.apply_chat_template([{"role": "user", "content": await self.get_next_item()}])
                group["tokens"], group["masks"], group["scores"] = [ids], [ids], [1]  # type: ignore[list-item]
                group["group_overrides"] = {"sft": True, "group_size": 1}
                group["overrides"] = [{"sft": True}]
                await self.handle_send_to_api(group, None)
        await super().env_step_checks()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_runner, "STATUS_INTERVAL_S", 0.01)


@asynccontextmanager
async def running(
    env_class: Any, tokenizer_dir: Path, client: RecordingClient, url: str, **settings: Any
) -> AsyncIterator[Any]:
    config = BaseEnvConfig(
        tokenizer_name=str(tokenizer_dir),
        group_size=4,
        use_wandb=False,
        max_num_workers=2,
        max_token_length=16,
        **settings,
    )
    env = env_class(
        config=config,
        server_configs=[APIServerConfig(model_name="m", base_url=url, api_key="x")],
        slurm=False,
        testing=False,
    )
    env._rollout_client = client
    task = asyncio.create_task(env.env_manager())
    try:
        yield env
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_chat_environment(tiny_tokenizer_dir: Path, tmp_path: Path):
    client = RecordingClient(batch_size=16, checkpoint_dir=str(tmp_path), checkpoint_interval=1)
    with HarnessServer(reply=lambda prompt, index: f"answer {index} {random.random():.3f}") as server:
        async with running(OldStyleEnv, tiny_tokenizer_dir, client, server.base_url, steps_per_eval=1) as env:
            await wait_until(lambda: len(client.groups) >= 3)
            for step in (1, 2):
                client.step = step
                await wait_until(lambda step=step: env.curr_step == step)
                await wait_until(lambda: env.eval_runner is not None and env.eval_runner.done())
                count = len(client.groups)
                await wait_until(lambda count=count: len(client.groups) >= count + 3)
            client.step = 3
            await wait_until(lambda: any("eval/percent_correct" in entry for entry in env.logged))
    group = client.groups[0]
    assert len(group["tokens"]) == 4
    assert all(isinstance(token, int) for token in group["tokens"][0])
    text = env.tokenizer.decode(group["tokens"][0])
    assert text.startswith("<|im_start|>system\nBe short.<|im_end|>")
    trained = env.tokenizer.decode([mask for mask in group["masks"][0] if mask != -100])
    assert trained.startswith("answer 0")
    assert {"train/percent_correct", "eval/percent_correct"} <= {key for entry in env.logged for key in entry}
    assert (tmp_path / "env_checkpoints" / "old_style_0" / "step-2.json").exists()
    assert env.statistics.failures.counts == {}


async def test_a_loader_that_overrides_the_loop(tiny_tokenizer_dir: Path):
    client = RecordingClient(batch_size=16)
    async with running(
        LoaderEnv, tiny_tokenizer_dir, client, "http://127.0.0.1:1/v1", ensure_scores_are_not_same=False
    ) as env:
        for step in (1, 2):
            client.step = step
            await wait_until(lambda step=step: env.curr_step == step)
    assert len(client.groups) == 4
    assert client.groups[0]["group_overrides"] == {"sft": True, "group_size": 1}


@pytest.mark.parametrize(
    ("servers", "urls"),
    [
        ([APIServerConfig(base_url="http://127.0.0.1:1/v1", api_key="x")], ["http://127.0.0.1:1/v1"]),
        (
            [OpenaiConfig(base_url=f"http://127.0.0.1:{port}/v1") for port in (1, 2)],
            ["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"],
        ),
        (APIServerConfig(base_url="http://127.0.0.1:1/v1"), ["http://127.0.0.1:1/v1"]),
        (ServerBaseline(model_name="m"), [f"http://localhost:{port}/v1" for port in range(9004, 9008)]),
    ],
)
def test_every_form_of_config_init(
    servers: Any, urls: list[str], tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)

    class Configured(OldStyleEnv):
        @classmethod
        def config_init(cls) -> tuple[BaseEnvConfig, Any]:
            return BaseEnvConfig(tokenizer_name=str(tiny_tokenizer_dir), use_wandb=False), servers

    env = env_cli.build_env(Configured, env_cli.resolve(Configured, "serve", []))
    assert [server.config.base_url for server in env.server.servers] == urls


class NoSlurmEnv(OldStyleEnv):
    """Its constructor has another third argument than ``slurm``, as evaluation environments have."""

    def __init__(self, config: Any, server_configs: Any, slurm_job_id: str | None = None, testing: bool = False):
        super().__init__(config, server_configs, slurm_job_id, testing)
        self.was_testing = testing


class AnyKeywordEnv(OldStyleEnv):
    """Hands everything on, unread."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.was_testing = kwargs["testing"]


class ShortEnv(OldStyleEnv):
    """Takes its config and servers only."""

    def __init__(self, config: Any, server_configs: Any):
        super().__init__(config, server_configs, slurm=False)
        self.was_testing = False


@pytest.mark.parametrize(
    ("env_class", "was_testing"), [(NoSlurmEnv, True), (AnyKeywordEnv, True), (ShortEnv, False), (OldStyleEnv, None)]
)
def test_constructors_of_every_form(env_class: Any, was_testing: bool | None, tiny_tokenizer_dir: Path):
    flags = ["--testing", "true", "--env.tokenizer_name", str(tiny_tokenizer_dir), "--env.use_wandb", "false"]
    env = env_cli.build_env(env_class, env_cli.resolve(env_class, "serve", flags))
    assert getattr(env, "was_testing", None) is was_testing
    assert env.config.tokenizer_name == str(tiny_tokenizer_dir)


class ChoosyEnv(OldStyleEnv):
    """Returns no group where all answers are equally good, which for most items they are."""

    first_useful = 30

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup | None, list[Item]]:
        group, backlog = await super().collect_trajectories(item)
        return (group if self.iter > self.first_useful else None), backlog


class UnscoredEnv(OldStyleEnv):
    """Hands its conversations on without scoring them."""

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        return [({"role": "assistant", "content": "hello"}, 1.0) for _ in range(self.config.group_size)], []


def processing(env_class: Any, tokenizer_dir: Path, path: Path) -> Any:
    flags = ["--testing", "true", "--env.tokenizer_name", str(tokenizer_dir), "--env.use_wandb", "false"]
    flags += ["--env.total_steps", "1", "--env.max_num_workers", "1", "--env.data_path_to_save_groups", str(path)]
    return env_cli.build_env(env_class, env_cli.resolve(env_class, "process", flags))


async def test_process_goes_on_while_the_environment_itself_drops_groups(tiny_tokenizer_dir: Path, tmp_path: Path):
    path = tmp_path / "groups.jsonl"
    await processing(ChoosyEnv, tiny_tokenizer_dir, path).process_manager()
    assert len(path.read_text().splitlines()) == 1


async def test_process_says_that_the_environment_made_no_group(tiny_tokenizer_dir: Path, tmp_path: Path):
    env = processing(ChoosyEnv, tiny_tokenizer_dir, tmp_path / "groups.jsonl")
    env.first_useful = 10**9
    with pytest.raises(AtroposError, match=r"0 of 1 groups made \(no group from the environment: 200\)"):
        await env.process_manager()


async def test_a_result_that_is_no_group_is_named(tiny_tokenizer_dir: Path, tmp_path: Path):
    env = processing(UnscoredEnv, tiny_tokenizer_dir, tmp_path / "groups.jsonl")
    with pytest.raises(AtroposError, match="not_a_group"):
        await env.process_manager()
    assert env.statistics.failures.counts == {}
