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
)


def _turn(prompt: str, reply: str, end: str = "", key: Any = None) -> Turn:
    text = prompt + reply
    ids = [ord(char) for char in text] + ([2] if end else [])
    node = SequenceNode(full_text=text, tokens=ids, masked_tokens=ids, logprobs=[-1.0] * len(ids))
    return Turn(node=node, prompt_text=prompt, reply_raw=reply + end, reply_text=reply, end_text=end, conversation=key)


def test_the_longest_text_wins() -> None:
    tree = SequenceTree()
    short, long = _turn("P:", "A"), _turn("P:", "AB")
    tree.add([short, long], None)
    found = tree.find_text("P:AB and more")
    assert found is not None
    assert found[0] is long
    tree.add([_turn("P:AB", "C")], extends=long)
    assert [node.full_text for node in tree.nodes] == ["P:A", "P:ABC"]
    assert tree.find_text("Q") is None


def test_control_tokens_decide_how_a_text_matches() -> None:
    tree = SequenceTree()
    tree.add([_turn("P", "A", end="<e>")], None)
    with_end, without_end = tree.find_text("PA<e>next"), tree.find_text("PAnext")
    assert with_end is not None
    assert with_end[1] is True
    assert without_end is not None
    assert without_end[1] is False
    turn = with_end[0]
    assert prefix_of(turn, "next").tokens[-1] == 2
    assert prefix_of(turn, "next", drop_end=True).tokens == [ord("P"), ord("A")]


def test_equal_replies_are_continued_one_after_the_other() -> None:
    tree = SequenceTree()
    first, second = _turn("P", "same", key=1), _turn("P", "same", key=1)
    tree.add([first, second], None)
    for expected in (first, second):
        found = tree.find_conversation([0, 1])
        assert found is not None
        assert found == (2, expected)
        tree.add([_turn("Psame+", "x", key=2)], extends=found[1])
    assert len(tree.nodes) == 2
    found = tree.find_conversation([1])
    assert found == (1, first)
    tree.add([_turn("Psame+", "y", key=3)], extends=first)
    assert len(tree.nodes) == 3


def test_tree_mode_keeps_what_was_continued() -> None:
    tree = SequenceTree(keep_all=True)
    root = _turn("P", "A", key=1)
    tree.add([root], None)
    tree.add([_turn("PA", "B", key=2)], extends=root)
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
    turn = Turn(node=first, prompt_text="", reply_raw="", reply_text="", end_text="")
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
