"""The record itself: lookups, replacement, masks."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.envs.server_handling.sequence_tree import (
    SequenceNode,
    SequenceTree,
    Turn,
    prefix_of,
    recorded_node,
    suffix_after_reply,
    turn_of,
)


def _turn(prompt: str, reply: str, end: str = "", key: Any = None) -> Turn:
    text = prompt + reply
    ids = [ord(char) for char in text] + ([2] if end else [])
    node = SequenceNode(full_text=text, tokens=ids, masked_tokens=ids, logprobs=[-1.0] * len(ids))
    turn = turn_of(node, prompt_text=prompt, reply_raw=reply + end, reply_text=reply, end_text=end)
    turn.conversation = key
    return turn


def _add(tree: SequenceTree, prompt: str, *replies: tuple[str, str, Any], extends: Turn | None = None) -> list[Turn]:
    turns = [_turn(prompt, reply, end, key) for reply, end, key in replies]
    tree.add(turns, prompt, extends)
    return turns


def test_the_longest_text_wins() -> None:
    tree = SequenceTree()
    _, long = _add(tree, "P:", ("A", "", None), ("AB", "", None))
    assert tree.find_text("P:AB and more") == (long, 4, True)
    _add(tree, "P:AB", ("C", "", None), extends=long)
    assert [node.full_text for node in tree.nodes] == ["P:A", "P:ABC"]
    assert tree.find_text("Q") is None


def test_control_tokens_decide_how_a_text_matches() -> None:
    tree = SequenceTree()
    (turn,) = _add(tree, "P", ("A", "<e>", None))
    assert tree.find_text("PA<e>next") == (turn, 5, True)
    assert tree.find_text("PAnext") == (turn, 2, False)
    assert prefix_of(turn, "next").tokens[-1] == 2
    assert prefix_of(turn, "next", drop_end=True).tokens == [ord("P"), ord("A")]


def test_equal_replies_are_continued_one_after_the_other() -> None:
    tree = SequenceTree()
    first, second = _add(tree, "P", ("same", "", 1), ("same", "", 1))
    for expected in (first, second):
        assert tree.find_conversation([0, 1]) == (2, expected)
        _add(tree, "Psame+", ("x", "", 2), extends=expected)
    assert len(tree.nodes) == 2
    assert tree.find_conversation([1]) == (1, first)
    _add(tree, "Psame+", ("y", "", 3), extends=first)
    assert [node.full_text for node in tree.nodes] == ["Psame+x", "Psame+x", "Psame+y"]


def test_earlier_turns_share_the_ids_of_the_node_that_replaced_theirs() -> None:
    tree = SequenceTree()
    (root,) = _add(tree, "P", ("A", "", 1))
    (second,) = _add(tree, "PA+", ("B", "", 2), extends=root)
    (third,) = _add(tree, "PA+B+", ("C", "", 3), extends=second)
    assert root.node is second.node is third.node is tree.nodes[0]
    assert "".join(chr(token) for token in prefix_of(root, "").tokens) == "PA"
    assert "".join(chr(token) for token in prefix_of(second, "").tokens) == "PA+B"
    assert [tree.is_live(turn) for turn in (root, second, third)] == [False, False, True]
    (branch,) = _add(tree, "PA+", ("D", "", 4), extends=root)
    assert [node.full_text for node in tree.nodes] == ["PA+B+C", "PA+D"]
    assert branch.node is not root.node


def test_nodes_taken_away_from_outside_are_not_continued() -> None:
    tree = SequenceTree()
    (root,) = _add(tree, "P", ("A", "", 1))
    tree.nodes = []
    assert not tree.is_live(root)
    _add(tree, "PA", ("B", "", 2), extends=root)
    assert [node.full_text for node in tree.nodes] == ["PAB"]


def test_tree_mode_keeps_what_was_continued() -> None:
    tree = SequenceTree(keep_all=True)
    (root,) = _add(tree, "P", ("A", "", 1))
    _add(tree, "PA", ("B", "", 2), extends=root)
    assert [node.full_text for node in tree.nodes] == ["PA", "PAB"]
    tree.clear()
    assert tree.nodes == []
    assert tree.find_text("PAB") is None
    assert tree.find_conversation([1]) is None


@pytest.mark.parametrize(
    ("rest", "reply", "end", "expected"),
    [
        ("Hi<e>\nnext", "Hi", "<e>", "\nnext"),
        ("Hi<e>\nnext", "Hi", "", "<e>\nnext"),
        ("Hi<e>\nnext", "Hi \n", "<e>", "\nnext"),
        (" Hi<e>\nnext", "Hi", "<e>", "\nnext"),
        ("Hi<e>\nnext", "Hi\n", "", "<e>\nnext"),
        ("Hi there<e>\nnext", "Hi", "<e>", None),
        ("Hi there<e>\nnext", "Hi", "", None),
        ("Ho<e>\nnext", "Hi", "<e>", None),
        ("<e>\nnext", "", "<e>", "\nnext"),
    ],
)
def test_what_follows_a_reply(rest: str, reply: str, end: str, expected: str | None) -> None:
    assert suffix_after_reply(rest, _turn("P", reply, end), "<e>\n") == expected


def test_masks_and_log_probs() -> None:
    first = recorded_node(
        prompt_ids=[1, 2], prefix=None, output_ids=[3, 4], output_logprobs=[-0.3], full_text="t", metadata={}
    )
    assert first.tokens == [1, 2, 3, 4]
    assert first.masked_tokens == [-100, -100, 3, 4]
    assert first.logprobs == [1.0, 1.0, -0.3, 1.0]
    turn = turn_of(first, prompt_text="", reply_raw="", reply_text="", end_text="")
    longer = recorded_node(
        prompt_ids=[1, 2, 3, 4, 5],
        prefix=prefix_of(turn, ""),
        output_ids=[6],
        output_logprobs=[-0.6, -9.0],
        full_text="t",
        metadata={},
    )
    assert longer.masked_tokens == [-100, -100, 3, 4, -100, 6]
    assert longer.logprobs == [1.0, 1.0, -0.3, 1.0, 1.0, -0.6]
    other = recorded_node(
        prompt_ids=[1, 9, 3, 4],
        prefix=prefix_of(turn, ""),
        output_ids=[6],
        output_logprobs=[-1.0],
        full_text="",
        metadata={},
    )
    assert other.masked_tokens == [-100] * 4 + [6]
