"""``atropos-sft-gen``: keep the best sequences of every group as fine-tuning rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from atroposlib.cli.group_collection import (
    Row,
    base_parser,
    check_for_batch,
    exit_code,
    find_common_prefix,
    messages_of,
    register_to_api,
    run,
    split_texts,
)
from atroposlib.utils.closed_pipe import ends_with_its_reader

__all__ = ["check_for_batch", "find_common_prefix", "grab_group_data", "main", "register_to_api", "sft_data_grabber"]


def grab_group_data(
    tok: Any,
    datagroup: dict[str, Any],
    save_messages: bool,
    save_top_n_per_group: int,
    allow_negative_scores: bool = False,
    minimum_score_diff_max_min: float = 0.0,
) -> list[Row]:
    """The best rows of a group: ``{"prefix", "completion", "score"}`` or, with messages, ``{"messages", "score"}``.

    Best first, positive scores only unless allowed, better than the group's worst by more than the minimum difference.
    """
    scores = [float(score) for score in datagroup["scores"]]
    rows: list[Row]
    if save_messages:
        rows = [{"messages": chat, "score": score} for chat, score in zip(messages_of(datagroup), scores, strict=False)]
    else:
        prefix, endings = split_texts(tok, datagroup)
        rows = [
            {"prefix": prefix, "completion": end, "score": score} for end, score in zip(endings, scores, strict=True)
        ]
    rows.sort(key=lambda row: row["score"], reverse=True)
    if not allow_negative_scores:
        rows = [row for row in rows if row["score"] > 0]
    if minimum_score_diff_max_min > 0:
        rows = [row for row in rows if row["score"] - min(scores) > minimum_score_diff_max_min]
    return rows[:save_top_n_per_group]


def sft_data_grabber(argv: Sequence[str] | None = None, *, client: Any = None) -> int:
    """Run the command with ``argv``; ``client`` stands in for the connection to the rollout server."""
    parser = base_parser("atropos-sft-gen", "Collect fine-tuning data from environments.")
    parser.add_argument("--save-top-n-per-group", type=int, default=3, help="rows of one group at most")
    parser.add_argument(
        "--minimum-score-diff-max-min",
        type=float,
        default=0.0,
        help="keep only scores this much above the group's worst",
    )
    parser.add_argument("--tasks-per-step", type=int, default=64, help="groups per batch")
    arguments = parser.parse_args(argv)

    def rows_of(tokenizer: Any, group: dict[str, Any]) -> list[Row]:
        return grab_group_data(
            tokenizer,
            group,
            arguments.save_messages,
            arguments.save_top_n_per_group,
            arguments.allow_negative_scores,
            arguments.minimum_score_diff_max_min,
        )

    return run(arguments, rows_of, groups_per_batch=arguments.tasks_per_step, label="fine-tuning rows", client=client)


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; a wrong setting is one line and exit code 2."""
    return exit_code("atropos-sft-gen", sft_data_grabber, argv)


if __name__ == "__main__":
    sys.exit(main())
