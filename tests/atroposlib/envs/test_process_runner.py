"""process: groups to a file, concurrently, surviving failures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import AtroposError, ConfigError
from simple_env import NumbersEnv, make_env


def prepare(
    tokenizer_dir: Path, path: Path, env_class: type[NumbersEnv] = NumbersEnv, *, groups: int, **settings: Any
) -> Any:
    env = make_env(tokenizer_dir, None, env_class, data_path_to_save_groups=str(path), **settings)
    env.process_mode, env.n_groups_to_process, env.group_size_to_process = True, groups, env.config.group_size
    return env


async def test_groups_are_made_concurrently_and_a_page_is_written(tiny_tokenizer_dir: Path, tmp_path: Path):
    env = prepare(tiny_tokenizer_dir, tmp_path / "g.jsonl", groups=6, include_messages=True)
    env.rollout_s = 0.02
    await env.process_manager()
    lines = [json.loads(line) for line in (tmp_path / "g.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert env.most_running == 8  # four workers, two rollouts each
    assert env.curr_step == 6
    assert "item 0" in (tmp_path / "g.html").read_text()


async def test_single_failures_cost_one_item_each_and_lines_are_flushed(tiny_tokenizer_dir: Path, tmp_path: Path):
    path = tmp_path / "g.jsonl"

    class Flaky(NumbersEnv):
        on_disk: list[int] = []  # noqa: RUF012 - one environment in this test

        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            if item % 3 == 1:
                raise RuntimeError("model answered nonsense")
            self.on_disk.append(len(path.read_text().splitlines()))
            return await super().collect_trajectory(item)

    env = prepare(tiny_tokenizer_dir, path, Flaky, groups=5, max_num_workers=1)
    await env.process_manager()
    assert len(path.read_text().splitlines()) == 5
    assert env.statistics.failures.by_place["collect_trajectories"] >= 2
    assert env.on_disk == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


async def test_only_written_groups_count(tiny_tokenizer_dir: Path, tmp_path: Path):
    class Often(NumbersEnv):
        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            if item == 0:
                return None, ["extra"]
            group, backlog = await super().collect_trajectories(item)
            if item == 1:
                group["scores"] = [1.0, 1.0]
            return group, backlog

    env = prepare(
        tiny_tokenizer_dir, tmp_path / "g.jsonl", Often, groups=3, max_num_workers=1, ensure_scores_are_not_same=True
    )
    await env.process_manager()
    lines = [json.loads(line) for line in (tmp_path / "g.jsonl").read_text().splitlines()]
    texts = [env.tokenizer.decode(line["tokens"][0]) for line in lines]
    assert texts == ["item extra", "item 2", "item 3"]
    assert env.statistics.rejected == {"equal_scores": 1}


async def test_the_end_of_the_items_ends_the_run(
    tiny_tokenizer_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    class Three(NumbersEnv):
        async def get_next_item(self) -> Any:
            item = await super().get_next_item()
            return item if item < 3 else None

    env = prepare(tiny_tokenizer_dir, tmp_path / "g.jsonl", Three, groups=10)
    await env.process_manager()
    assert len((tmp_path / "g.jsonl").read_text().splitlines()) == 3
    assert "3 of 10 groups made" in caplog.text


async def test_nothing_but_failures_gives_up_and_says_why(tiny_tokenizer_dir: Path, tmp_path: Path):
    class Broken(NumbersEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            raise RuntimeError("no server")

    env = prepare(tiny_tokenizer_dir, tmp_path / "g.jsonl", Broken, groups=10)
    with pytest.raises(AtroposError, match=r"0 of 10 groups made .*RuntimeError"):
        await asyncio.wait_for(env.process_manager(), 20)
    assert 20 <= env.statistics.failures.by_place["collect_trajectories"] < 30


async def test_an_item_that_cannot_be_made_costs_itself_even_when_it_is_the_first(
    tiny_tokenizer_dir: Path, tmp_path: Path
):
    class Flaky(NumbersEnv):
        async def get_next_item(self) -> Any:
            item = await super().get_next_item()
            if item == 0:
                raise ValueError("no such row")
            return item

    env = prepare(tiny_tokenizer_dir, tmp_path / "g.jsonl", Flaky, groups=2, max_num_workers=1)
    await env.process_manager()
    assert len((tmp_path / "g.jsonl").read_text().splitlines()) == 2
    assert dict(env.statistics.failures.by_place) == {"get_next_item": 1}


async def test_the_patience_counts_the_workers_that_run_not_those_allowed(tiny_tokenizer_dir: Path, tmp_path: Path):
    class TooSmall(NumbersEnv):
        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            group, backlog = await super().collect_trajectories(item)
            return {key: value[:1] if isinstance(value, list) else value for key, value in group.items()}, backlog

    env = prepare(tiny_tokenizer_dir, tmp_path / "g.jsonl", TooSmall, groups=2, max_num_workers=6144)
    with pytest.raises(AtroposError, match=r"0 of 2 groups made \(wrong_size: 2[01]\)"):
        await asyncio.wait_for(env.process_manager(), 20)


async def test_a_rollout_that_is_cancelled_from_inside_is_a_failure_of_its_item(
    tiny_tokenizer_dir: Path, tmp_path: Path
):
    class Cancelled(NumbersEnv):
        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            if item == 1:
                raise asyncio.CancelledError("by a library")
            return await super().collect_trajectories(item)

    env = prepare(tiny_tokenizer_dir, tmp_path / "g.jsonl", Cancelled, groups=4, max_num_workers=1)
    await env.process_manager()
    assert len((tmp_path / "g.jsonl").read_text().splitlines()) == 4
    assert env.statistics.failures.by_place["collect_trajectories"] == 1


async def test_postprocess_histories_may_be_a_plain_function_and_fail(tiny_tokenizer_dir: Path, tmp_path: Path):
    class Plain(NumbersEnv):
        def postprocess_histories(self, trajectories: Any) -> Any:
            text = self.tokenizer.decode(trajectories["tokens"][0])
            if text == "item 0":
                raise KeyError("no such key")
            return None if text == "item 1" else trajectories | {"scores": [7.0, 8.0]}

    env = prepare(tiny_tokenizer_dir, tmp_path / "g.jsonl", Plain, groups=2, max_num_workers=1)
    await env.process_manager()
    lines = [json.loads(line) for line in (tmp_path / "g.jsonl").read_text().splitlines()]
    assert [line["scores"] for line in lines] == [[7.0, 8.0], [7.0, 8.0]]
    assert dict(env.statistics.failures.by_place) == {"postprocess_histories": 1}


def test_a_file_of_groups_where_no_folder_can_be(tiny_tokenizer_dir: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="data_path_to_save_groups: the folder"):
        prepare(tiny_tokenizer_dir, tmp_path / "file" / "g.jsonl", groups=1)
