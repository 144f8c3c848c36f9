"""What the two data-generation commands share: act as a trainer, take groups, write rows.

The output file is opened before the rollout server is touched, so a wrong path costs nothing and disturbs nobody.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.tokenizers.loading import load_tokenizer

DEFAULT_TOKENIZER = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
Row = dict[str, Any]
RowsOf = Callable[[Any, dict[str, Any]], list[Row]]
"""(tokenizer or None, group) -> rows to write."""


def find_common_prefix(strings: Sequence[str]) -> str:
    """The longest text all ``strings`` begin with."""
    return os.path.commonprefix(list(strings)) if strings else ""  # noqa: RUF071 (character by character is what is meant)


def split_texts(tokenizer: Any, group: dict[str, Any]) -> tuple[str, list[str]]:
    """The decoded sequences of a group as (common prefix, what follows it in each)."""
    texts = [tokenizer.decode([int(token) for token in tokens]) for tokens in group["tokens"]]
    prefix = find_common_prefix(texts)
    return prefix, [text[len(prefix) :] for text in texts]


def messages_of(group: dict[str, Any]) -> list[Any]:
    """The conversations of a group; a group without them is an error that says what to switch on."""
    messages = group.get("messages")
    if not messages:
        raise ConfigError(
            "--save-messages needs groups with messages; start the environment with --env.include_messages true"
        )
    return list(messages)


def open_output(filepath: str | Path, *, append: bool) -> TextIO:
    """Open the output for writing; an existing file without ``append`` is a ``ValueError``."""
    path = Path(filepath)
    if path.exists() and not append:
        raise ConfigError(f"{path} exists already; name another file or pass --append-to-previous")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a" if append else "x", encoding="utf-8")


def register_to_api(client: Any, *, batch_size: int, max_token_len: int, num_steps: int) -> Any:
    """Register as the trainer; the step count leaves room, so that environments go on until enough is written."""
    return client.register(
        batch_size=batch_size,
        max_token_len=max_token_len,
        num_steps=max(1, num_steps),
        checkpoint_dir="checkpoints",
        save_checkpoint_interval=10,
        wandb_group="test",
        wandb_project="test",
    )


def check_for_batch(client: Any, *, timeout_s: float = 1.0) -> Any:
    """The next batch (``seq``, ``groups``), waiting as long as it takes."""
    while True:
        batch = client.next_batch(timeout_s=timeout_s)
        if batch is not None:
            return batch


def collect_rows(client: Any, output: TextIO, rows_of: RowsOf, tokenizer: Any, *, num_rows: int, label: str) -> int:
    """Take batches and write rows until ``num_rows`` are on disk; a batch is acknowledged once its rows are."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    written = num_groups = 0
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task(label, total=num_rows)
        while written < num_rows:
            batch = check_for_batch(client)
            rows = [row for group in batch.groups for row in rows_of(tokenizer, group)][: num_rows - written]
            _write(output, rows)
            client.ack(batch.seq)
            written += len(rows)
            num_groups += len(batch.groups)
            progress.update(task, completed=written, description=f"{label} from {num_groups} groups")
    return written


def _write(output: TextIO, rows: Iterable[Row]) -> None:
    for row in rows:
        output.write(json.dumps(row, ensure_ascii=False, default=float) + "\n")
    output.flush()


def base_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The flags both commands have."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("filepath", help="the JSON lines file to write")
    parser.add_argument("--api-url", default="http://localhost:8000", help="rollout server")
    parser.add_argument("--group-size", type=int, default=2, help="sequences per group")
    parser.add_argument("--max-token-len", type=int, default=2048, help="longest sequence environments may send")
    parser.add_argument(
        "--tokenizer", default=DEFAULT_TOKENIZER, help="turns token ids into text (unused with --save-messages)"
    )
    parser.add_argument("--save-messages", action="store_true", help="write the conversations instead of decoded text")
    parser.add_argument("--num-seqs-to-save", type=int, default=100, help="stop after this many rows")
    parser.add_argument(
        "--allow-negative-scores", action="store_true", help="keep sequences whose score is not positive"
    )
    parser.add_argument("--append-to-previous", action="store_true", help="add to an existing file")
    return parser


def run(
    arguments: argparse.Namespace, rows_of: RowsOf, *, groups_per_batch: int, label: str, client: Any = None
) -> int:
    """Output first, then tokenizer, then the server; returns the number of rows written."""
    with open_output(arguments.filepath, append=arguments.append_to_previous) as output:
        try:
            tokenizer = None if arguments.save_messages else load_tokenizer(arguments.tokenizer)
            with contextlib.closing(client or _connect(arguments.api_url)) as trainer:
                register_to_api(
                    trainer,
                    batch_size=arguments.group_size * groups_per_batch,
                    max_token_len=arguments.max_token_len,
                    num_steps=arguments.num_seqs_to_save * 2,
                )
                num_rows = arguments.num_seqs_to_save
                return collect_rows(trainer, output, rows_of, tokenizer, num_rows=num_rows, label=label)
        finally:
            if not output.tell():  # no row was written: an empty file would stand in the next one's way
                Path(arguments.filepath).unlink(missing_ok=True)


def exit_code(command: str, grabber: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None) -> int:
    """Run a command; a wrong setting is one line and exit code 2, another trouble of ours one line and 1."""
    try:
        grabber(argv)
    except AtroposError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


def _connect(url: str) -> Any:
    from atroposlib.api.client import TrainerClient

    return TrainerClient(url)
