"""``atropos-sft-gen`` and ``atropos-dpo-gen``: right rows, and the server is touched only once the output is open."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.cli import dpo, sft
from atroposlib.cli.group_collection import find_common_prefix


class FakeTrainerClient:
    """Serves prepared batches and records every call."""

    def __init__(self, *batches: list[dict[str, Any]]) -> None:
        self.batches = list(enumerate(batches))
        self.calls: list[tuple[str, Any]] = []

    def register(self, **kwargs: Any) -> int:
        self.calls.append(("register", kwargs))
        return 1

    def next_batch(self, *, timeout_s: float | None = None) -> Any:
        self.calls.append(("next_batch", None))
        if not self.batches:
            return None
        seq, groups = self.batches.pop(0)
        return SimpleNamespace(seq=seq, groups=groups)

    def ack(self, seq: int) -> None:
        self.calls.append(("ack", seq))

    def close(self) -> None:
        self.calls.append(("close", None))


def group(tokenizer: Any, endings: list[str], scores: list[float]) -> dict[str, Any]:
    return {
        "tokens": [tokenizer.encode("Q: same A: " + ending) for ending in endings],
        "scores": scores,
        "messages": [
            [{"role": "user", "content": "Q"}, {"role": "assistant", "content": ending}] for ending in endings
        ],
    }


def test_common_prefix() -> None:
    assert find_common_prefix(["abcd", "abx", "ab"]) == "ab"
    assert find_common_prefix(["a", "b"]) == ""
    assert find_common_prefix([]) == ""


def test_sft_rows(tiny_tokenizer: Any) -> None:
    one = group(tiny_tokenizer, ["x", "y", "z", "w"], [0.5, 1.0, -1.0, 0.0])
    rows = sft.grab_group_data(tiny_tokenizer, one, False, 3)
    assert rows == [
        {"prefix": "Q: same A: ", "completion": "y", "score": 1.0},
        {"prefix": "Q: same A: ", "completion": "x", "score": 0.5},
    ]
    assert [row["completion"] for row in sft.grab_group_data(tiny_tokenizer, one, False, 9, True)] == [
        "y",
        "x",
        "w",
        "z",
    ]
    assert [row["completion"] for row in sft.grab_group_data(tiny_tokenizer, one, False, 9, True, 1.4)] == ["y", "x"]
    assert sft.grab_group_data(None, one, True, 1) == [{"messages": one["messages"][1], "score": 1.0}]


def test_dpo_pairs(tiny_tokenizer: Any) -> None:
    one = group(tiny_tokenizer, ["x", "y", "z"], [0.9, 1.0, -1.0])
    pairs = dpo.grab_group_data(tiny_tokenizer, one, False, 3, False, 0.5, random.Random(0))
    assert pairs == [{"prefix": "Q: same A: ", "pos": "y", "neg": "z", "score": 1.0}]  # z is used up, x has no partner
    (pair,) = dpo.grab_group_data(None, one, True, 1, False, 0.5)
    assert pair == {"pos": one["messages"][1], "neg": one["messages"][2], "score": 1.0}
    assert (
        dpo.grab_group_data(tiny_tokenizer, group(tiny_tokenizer, ["x", "y"], [1.0, 0.8]), False, 3, False, 0.5) == []
    )


def test_messages_that_are_not_there_say_what_to_switch_on(tiny_tokenizer: Any) -> None:
    bare = {"tokens": [[1]], "scores": [1.0], "messages": None}
    with pytest.raises(ValueError, match="include_messages"):
        sft.grab_group_data(None, bare, True, 1)


def test_sft_command_writes_registers_and_acknowledges(
    tiny_tokenizer: Any, tiny_tokenizer_dir: Path, tmp_path: Path
) -> None:
    target = tmp_path / "new" / "rows.jsonl"
    client = FakeTrainerClient(
        [group(tiny_tokenizer, ["a", "b"], [1.0, 0.5])], [group(tiny_tokenizer, ["c", "d"], [0.2, 0.1])]
    )
    arguments = [
        str(target),
        "--tokenizer",
        str(tiny_tokenizer_dir),
        "--num-seqs-to-save",
        "3",
        "--group-size",
        "2",
        "--tasks-per-step",
        "4",
    ]
    assert sft.sft_data_grabber(arguments, client=client) == 3
    assert [json.loads(line)["completion"] for line in target.read_text().splitlines()] == ["a", "b", "c"]
    name, registered = client.calls[0]
    assert name == "register"
    assert registered["batch_size"] == 8
    assert registered["num_steps"] == 6  # the environments must not stop at once
    assert [call for call in client.calls if call[0] in ("ack", "close")] == [("ack", 0), ("ack", 1), ("close", None)]


@pytest.mark.parametrize("command", [sft, dpo])
def test_an_existing_file_is_refused_before_the_server_is_touched(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "rows.jsonl"
    target.write_text("precious\n")
    client = FakeTrainerClient()
    grab = command.sft_data_grabber if command is sft else command.dpo_data_grabber
    with pytest.raises(ValueError, match="exists already"):
        grab([str(target), "--save-messages"], client=client)
    assert client.calls == []
    assert target.read_text() == "precious\n"
    assert command.main([str(target), "--api-url", "http://127.0.0.1:1"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_dpo_appends(tiny_tokenizer: Any, tmp_path: Path) -> None:
    target = tmp_path / "pairs.jsonl"
    target.write_text('{"old": 1}\n')
    client = FakeTrainerClient([group(tiny_tokenizer, ["good", "bad"], [1.0, 0.0])])
    arguments = [str(target), "--save-messages", "--num-seqs-to-save", "1", "--append-to-previous"]
    assert dpo.dpo_data_grabber(arguments, client=client) == 1
    old, new = (json.loads(line) for line in target.read_text().splitlines())
    assert old == {"old": 1}
    assert new["pos"][1]["content"] == "good"
    assert client.calls[0][1]["batch_size"] == 16


def test_what_ends_before_the_first_row_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class StoppedClient(FakeTrainerClient):
        def next_batch(self, *, timeout_s: float | None = None) -> Any:
            raise KeyboardInterrupt  # Ctrl-C while waiting

    path = tmp_path / "rows.jsonl"
    client = StoppedClient()
    with pytest.raises(KeyboardInterrupt):
        sft.sft_data_grabber([str(path), "--save-messages"], client=client)
    assert client.calls[-1] == ("close", None)
    assert not path.exists()
    assert sft.main([str(path), "--tokenizer", str(tmp_path / "nosuch")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("atropos-sft-gen: the tokenizer")
    assert "could not be loaded" in error
    assert not path.exists()
