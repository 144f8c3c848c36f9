"""The exact-token record of a session: which ids were sent and sampled, and which sequence a prompt continues (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

IGNORED = -100
NO_LOGPROB = 1.0


class SequenceNode(BaseModel):
    """One trainable sequence. The three lists have the same length L."""

    full_text: str
    tokens: list[int]  # [L] every id, sent or sampled
    masked_tokens: list[int]  # [L] the id where it was sampled, -100 where it was sent
    logprobs: list[float]  # [L] log-prob where it was sampled, 1.0 where it was sent
    metadata: dict[str, Any] | None = None


@dataclass(slots=True, eq=False)
class Place:
    """Where a sequence stands in the record. All turns of a sequence share it, so that earlier turns, which are prefixes
    of the node that replaced theirs, cost no memory of their own."""

    node: SequenceNode


@dataclass(kw_only=True, slots=True, eq=False)
class Turn:
    """What is known of the moment a node was made; needed to see whether a later prompt continues it."""

    place: Place
    num_tokens: int  # of the node when this turn ended
    prompt_length: int
    prompt_hash: int  # of the prompt's text
    reply_raw: str  # the sampled text with control tokens
    reply_text: str  # without
    end_text: str  # text of the control token that ended the reply; empty when none did
    policy_versions: tuple[int, ...] = ()
    conversation: Hashable | None = None  # key of the messages including the reply; None for plain completions
    is_continued: bool = False  # its node was replaced by a longer one

    @property
    def node(self) -> SequenceNode:
        """The node of this turn, or the longer one that replaced it."""
        return self.place.node

    def begins(self, prompt: str) -> bool:
        """Whether ``prompt`` begins with the prompt of this turn."""
        return len(prompt) >= self.prompt_length and hash(prompt[: self.prompt_length]) == self.prompt_hash


def turn_of(node: SequenceNode, *, prompt_text: str, reply_raw: str, reply_text: str, end_text: str) -> Turn:
    """The turn that made ``node``."""
    return Turn(
        place=Place(node),
        num_tokens=len(node.tokens),
        prompt_length=len(prompt_text),
        prompt_hash=hash(prompt_text),
        reply_raw=reply_raw,
        reply_text=reply_text,
        end_text=end_text,
        policy_versions=tuple((node.metadata or {}).get("policy_versions", ())),
    )


@dataclass(kw_only=True, slots=True)
class Prefix:
    """Recorded ids that a new prompt begins with, and the text that follows them."""

    turn: Turn
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    suffix_text: str


class SequenceTree:
    """Nodes in the order they were made; a continued node is replaced in its place (or kept, in tree mode).

    Lookups go by hash: of the conversation, or of the text up to each length at which a recorded sequence ends.
    """

    def __init__(self, keep_all: bool = False) -> None:
        self.keep_all = keep_all
        self.nodes: list[SequenceNode] = []
        self._by_conversation: dict[Hashable, list[Turn]] = defaultdict(list)
        self._by_text: dict[
            int, dict[int, list[tuple[Turn, bool]]]
        ] = {}  # length -> hash -> (turn, with control token)

    def clear(self) -> None:
        """Forget everything."""
        self.nodes = []
        self._by_conversation.clear()
        self._by_text.clear()

    def is_live(self, turn: Turn) -> bool:
        """Whether the node is still a leaf: nothing has continued it in place."""
        return not turn.is_continued and any(node is turn.node for node in self.nodes)

    def find_conversation(self, keys: Sequence[Hashable]) -> tuple[int, Turn] | None:
        """The longest recorded conversation that begins this one, with its number of messages."""
        for count in range(len(keys), 0, -1):
            turns = self._by_conversation.get(keys[count - 1])
            if turns:
                # Equal replies are continued one after the other; when all are, a new branch starts.
                return count, next((turn for turn in turns if self.is_live(turn)), turns[0])
        return None

    def find_text(self, prompt: str) -> tuple[Turn, int, bool] | None:
        """The longest recorded text that begins ``prompt``, its length, and whether it has its control token."""
        for length in sorted(self._by_text, reverse=True):
            if length > len(prompt):
                continue
            found = self._by_text[length].get(hash(prompt[:length]))
            if found:
                turn, with_control = next((entry for entry in found if self.is_live(entry[0])), found[0])
                return turn, length, with_control
        return None

    def add(self, turns: Sequence[Turn], prompt_text: str, extends: Turn | None) -> None:
        """Record the choices of one call: the first takes the place of the node it continues, the others are new."""
        for index, turn in enumerate(turns):
            if index == 0 and extends is not None and not self.keep_all and self.is_live(extends):
                self._replace(extends, turn)
            else:
                self.nodes.append(turn.node)
            self._index(turn, prompt_text)

    def _replace(self, extended: Turn, turn: Turn) -> None:
        old, new = extended.node, turn.node
        self.nodes[next(i for i, node in enumerate(self.nodes) if node is old)] = new
        extended.is_continued = True
        if new.tokens[: extended.num_tokens] == old.tokens:
            turn.place = extended.place
            turn.place.node = new

    def _index(self, turn: Turn, prompt_text: str) -> None:
        if turn.conversation is not None:
            self._by_conversation[turn.conversation].append(turn)
        for reply in {turn.reply_raw, turn.reply_text}:
            text = prompt_text + reply
            entries = self._by_text.setdefault(len(text), {}).setdefault(hash(text), [])
            entries.append((turn, reply == turn.reply_raw))


def prefix_of(turn: Turn, suffix_text: str, *, drop_end: bool = False) -> Prefix:
    """The ids of ``turn`` to continue from; ``drop_end`` leaves out the control token that ended the reply."""
    node = turn.node
    end = turn.num_tokens - 1 if drop_end and turn.end_text else turn.num_tokens
    return Prefix(
        turn=turn,
        tokens=node.tokens[:end],
        masked_tokens=node.masked_tokens[:end],
        logprobs=node.logprobs[:end],
        suffix_text=suffix_text,
    )


def suffix_after_reply(rest: str, turn: Turn, turn_end: str | None) -> str | None:
    """What follows the reply of ``turn`` in ``rest``, the new prompt after the old prompt's text.

    The reply may come back without its control token or with other white space round it. None when ``rest`` does not
    show this reply: the template or the caller changed it.
    """
    end = end_of_turn(turn, turn_end)
    if end and rest.startswith(turn.reply_raw):
        return rest[len(turn.reply_raw) :]
    if not end and rest.startswith(turn.reply_text):
        after = rest[len(turn.reply_text) :]
        if _ends_turn(after, turn_end):
            return after
    body = rest.lstrip()
    core = turn.reply_text.strip()
    if not body.startswith(core):
        return None
    after = body[len(core) :]
    if end:
        place = after.find(end)
        return after[place + len(end) :] if place >= 0 and not after[:place].strip() else None
    trimmed = after.lstrip() if turn.reply_text != turn.reply_text.rstrip() else after
    return trimmed if _ends_turn(trimmed, turn_end) else None


def end_of_turn(turn: Turn, turn_end: str | None) -> str:
    """The sampled control token's text if it is the one the template ends a turn with, else nothing."""
    return turn.end_text if turn_end is None or turn.end_text in turn_end else ""


def _ends_turn(text: str, turn_end: str | None) -> bool:
    return turn_end is None or not turn_end.strip() or text.lstrip().startswith(turn_end.strip())


def recorded_node(
    *,
    prompt_ids: Sequence[int],
    prefix: Prefix | None,
    output_ids: Sequence[int],
    output_logprobs: Sequence[float],
    full_text: str,
    metadata: dict[str, Any],
) -> SequenceNode:
    """The node of one choice: ids sent are masked, ids sampled (in this or an earlier turn) are not.

    Missing log-probs are filled with 1.0 and surplus ones cut.
    """
    masked, logprobs = [IGNORED] * len(prompt_ids), [NO_LOGPROB] * len(prompt_ids)
    if prefix is not None and list(prompt_ids[: len(prefix.tokens)]) == prefix.tokens:
        masked[: len(prefix.tokens)] = prefix.masked_tokens
        logprobs[: len(prefix.tokens)] = prefix.logprobs
    sampled = [float(value) for value in output_logprobs[: len(output_ids)]]
    sampled += [NO_LOGPROB] * (len(output_ids) - len(sampled))
    return SequenceNode(
        full_text=full_text,
        tokens=[*prompt_ids, *output_ids],
        masked_tokens=[*masked, *output_ids],
        logprobs=[*logprobs, *sampled],
        metadata=metadata,
    )
