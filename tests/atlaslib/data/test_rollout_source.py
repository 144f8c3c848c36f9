"""Batches from the rollout server: staleness, positions, deadlines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from atlaslib.data.rollout_source import RolloutSource, staleness
from atlaslib.errors import RolloutTimeoutError
from atroposlib.api.client import TrainerClient
from atroposlib.testing.api import serve_api


@pytest.fixture(scope="module")
def api_url() -> Iterator[str]:
    with serve_api() as api:
        yield api.url


@pytest.fixture
def client(api_url: str) -> Iterator[TrainerClient]:
    import urllib.request

    urllib.request.urlopen(f"{api_url}/reset_data").close()
    client = TrainerClient(api_url)
    yield client
    client.close()


def send(url: str, versions: list[int], **changes: Any) -> None:
    import json
    import urllib.request

    group = {
        "tokens": [[1, 2, 3], [1, 2, 4]],
        "masks": [[-100, 2, 3], [-100, 2, 4]],
        "scores": [0.0, 1.0],
        "policy_versions": [versions, versions],
        **changes,
    }
    request = urllib.request.Request(
        f"{url}/scored_data", json.dumps(group).encode(), {"content-type": "application/json"}
    )
    urllib.request.urlopen(request).close()


def make_source(client: TrainerClient, **options: Any) -> RolloutSource:
    source = RolloutSource(
        client,
        **{"default_temperature": 1.0, "max_staleness": 2, "wait_timeout_s": 5.0, **options},
    )
    source.register(batch_size=2, max_token_len=64, num_steps=10, checkpoint_dir="out", save_checkpoint_interval=1)
    return source


def test_old_samples_are_refused_and_counted(api_url: str, client: TrainerClient) -> None:
    source = make_source(client)
    client.next_batch(timeout_s=0.05)
    for version in (1, 7, 8):
        send(api_url, [version])
    batch = source.next(version=9)
    assert batch is not None
    assert [sample.policy_versions for sample in batch.samples] == [[7], [7]]
    assert batch.refused_stale == 2
    following = source.next(version=10)
    assert following is not None
    assert [sample.policy_versions for sample in following.samples] == [[8], [8]]


def test_the_oldest_token_decides(api_url: str, client: TrainerClient) -> None:
    source = make_source(client)
    client.next_batch(timeout_s=0.05)
    send(api_url, [3, 9])
    send(api_url, [9])
    batch = source.next(version=9)
    assert batch is not None
    assert batch.samples[0].policy_versions == [9]


def test_groups_of_an_earlier_run_are_said_counted_and_not_younger_than_new(
    api_url: str, client: TrainerClient, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_source(client)
    client.next_batch(timeout_s=0.05)
    send(api_url, [57])
    send(api_url, [58])
    send(api_url, [0])
    batches = [source.next(version=0) for _ in range(3)]
    assert [batch.ahead for batch in batches if batch is not None] == [2, 2, 0]
    assert [staleness(sample, 0) for batch in batches if batch is not None for sample in batch.samples] == [0] * 6
    told = [record.getMessage() for record in caplog.records if "has not reached (it is at 0)" in record.getMessage()]
    assert len(told) == 1


def test_broken_groups_are_set_aside(api_url: str, client: TrainerClient) -> None:
    source = make_source(client)
    client.next_batch(timeout_s=0.05)
    send(api_url, [5], advantages=[[1.0, 2.0, 3.0, 4.0, 5.0]] * 2)
    send(api_url, [5])
    batch = source.next(version=5)
    assert batch is not None
    assert batch.refused_broken == 2
    assert len(batch.samples) == 2


def test_a_restart_continues_after_the_committed_batch(api_url: str, client: TrainerClient) -> None:
    source = make_source(client)
    client.next_batch(timeout_s=0.05)
    for version in (1, 2, 3):
        send(api_url, [version])
    first = source.next(version=1)
    assert first is not None
    source.commit(step=1)
    assert source.next(version=2) is not None
    other = TrainerClient(api_url)
    again = RolloutSource(other, default_temperature=1.0, max_staleness=5, wait_timeout_s=5.0)
    again.register(
        batch_size=2,
        max_token_len=64,
        num_steps=10,
        checkpoint_dir="out",
        save_checkpoint_interval=1,
        starting_step=1,
        resume_after=first.seq,
    )
    batch = again.next(version=2)
    assert batch is not None
    assert [sample.policy_versions for sample in batch.samples] == [[2], [2]]
    again.close()


def test_a_wait_has_a_deadline_and_says_who_is_waited_for(client: TrainerClient, api_url: str) -> None:
    source = make_source(client, wait_timeout_s=0.2, url=api_url)
    with pytest.raises(RolloutTimeoutError, match="environments have not delivered enough sequences"):
        source.next(version=0)


def test_a_stop_request_ends_the_wait(client: TrainerClient) -> None:
    source = make_source(client, should_stop=lambda: True)
    assert source.next(version=0) is None


def test_a_report_that_did_not_arrive_goes_with_the_next(
    client: TrainerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(client)
    source.last_seq = 4
    arrived: list[tuple[int, dict[str, float]]] = []
    answers = iter([False, True, True])

    def report(name: str, step: int, metrics: dict[str, float]) -> bool:
        answer = next(answers)
        if answer:
            arrived.append((step, metrics))
        return answer

    monkeypatch.setattr(client, "report", report)
    source.report(1, {"loss": 0.5})
    assert arrived == []
    source.last_seq = 5
    source.report(2, {"loss": 0.25})
    assert arrived == [(1, {"loss": 0.5, "batch_seq": 4.0}), (2, {"loss": 0.25, "batch_seq": 5.0})]


def test_a_report_survives_a_connection_that_was_closed_meanwhile(client: TrainerClient) -> None:
    client.status()
    client._http._connection().sock.close()  # what a server does to a connection that was idle for long
    assert client.report("trainer", 1, {"loss": 1.0})


def test_a_report_to_nobody_is_not_delivered(free_port: int) -> None:
    assert not TrainerClient(f"http://127.0.0.1:{free_port}").report("trainer", 1, {"loss": 1.0})
