"""``atropos-dpo-gen``: preference pairs out of the better and worse sequences of every group."""

from __future__ import annotations

import random
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

__all__ = ["check_for_batch", "dpo_data_grabber", "find_common_prefix", "grab_group_data", "main", "register_to_api"]

_GROUPS_PER_BATCH = 8


def grab_group_data(
    tok: Any,
    datagroup: dict[str, Any],
    save_messages: bool,
    save_n_pairs_per_group: int,
    allow_negative_scores: bool = False,
    minimum_score_diff_max_min: float = 0.0,
    rng: random.Random | None = None,
) -> list[Row]:
    """Pairs ``{"prefix", "pos", "neg", "score"}`` or, with messages, ``{"pos", "neg", "score"}`` (score of the better one).

    The best sequences, positive ones only unless allowed, each against one of the worst chosen at random among those that
    score lower by more than the minimum difference; no sequence is the worse half of two pairs.
    """
    choose = (rng or random).choice
    scores = [float(score) for score in datagroup["scores"]]
    if save_messages:
        shared: Row = {}
        contents = messages_of(datagroup)
    else:
        prefix, contents = split_texts(tok, datagroup)
        shared = {"prefix": prefix}
    best_first = sorted(range(len(scores)), key=lambda index: -scores[index])
    better = [index for index in best_first if allow_negative_scores or scores[index] > 0][:save_n_pairs_per_group]
    worse = best_first[::-1][:save_n_pairs_per_group]
    pairs: list[Row] = []
    for index in better:
        candidates = [other for other in worse if scores[other] < scores[index] - minimum_score_diff_max_min]
        if candidates:
            other = choose(candidates)
            worse.remove(other)
            pairs.append({**shared, "pos": contents[index], "neg": contents[other], "score": scores[index]})
    return pairs


def dpo_data_grabber(argv: Sequence[str] | None = None, *, client: Any = None) -> int:
    """Run the command with ``argv``; ``client`` stands in for the connection to the rollout server."""
    parser = base_parser("atropos-dpo-gen", "Collect preference pairs from environments.")
    parser.add_argument("--save-n-pairs-per-group", type=int, default=3, help="pairs of one group at most")
    parser.add_argument(
        "--minimum-score-diff-max-min", type=float, default=0.5, help="smallest difference of scores within a pair"
    )
    arguments = parser.parse_args(argv)

    def rows_of(tokenizer: Any, group: dict[str, Any]) -> list[Row]:
        return grab_group_data(
            tokenizer,
            group,
            arguments.save_messages,
            arguments.save_n_pairs_per_group,
            arguments.allow_negative_scores,
            arguments.minimum_score_diff_max_min,
        )

    return run(arguments, rows_of, groups_per_batch=_GROUPS_PER_BATCH, label="preference pairs", client=client)


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; a wrong setting is one line and exit code 2."""
    return exit_code("atropos-dpo-gen", dpo_data_grabber, argv)


if __name__ == "__main__":
    sys.exit(main())
