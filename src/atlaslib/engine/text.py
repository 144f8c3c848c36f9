"""Tokens to text as they arrive: whole characters only, stop strings found, nothing emitted that a stop may cut."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\ufffd"  # what decoders write for the beginning of a character that is not complete yet


class TextStream:
    """The growing text of one reply."""

    def __init__(self, tokenizer: Any, *, stops: list[str], skip_special: bool = True, keep_stop: bool = False) -> None:
        self.tokenizer, self.stops, self.skip_special, self.keep_stop = tokenizer, stops, skip_special, keep_stop
        self.text = ""
        self.stop: str | None = None
        self._ids: list[int] = []
        self._context = 0  # first token that is decoded again, so that joins come out right
        self._read = 0  # tokens whose text is in `text`
        self._emitted = 0

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def push(self, token_ids: list[int], *, search: bool = True) -> str | None:
        """Take new tokens; returns the stop string when one is complete (the text is then cut)."""
        self._ids += token_ids
        before = self._decode(self._ids[self._context : self._read])
        now = self._decode(self._ids[self._context :])
        if now.endswith(_REPLACEMENT) or len(now) <= len(before):
            return None
        searched = max(0, len(self.text) - max(map(len, self.stops), default=0))
        self.text += now[len(before) :]
        self._context, self._read = self._read, len(self._ids)
        return self._find_stop(searched) if search else None

    def _find_stop(self, searched: int) -> str | None:
        hits = [(at, stop) for stop in self.stops if (at := self.text.find(stop, searched)) >= 0]
        if hits:
            at, self.stop = min(hits)
            self.text = self.text[: at + len(self.stop) if self.keep_stop else at]
        return self.stop

    def take(self, *, final: bool) -> str:
        """Text not handed out yet; while not final, the beginning of a possible stop string is held back."""
        end = len(self.text)
        if not final:
            end -= max((_overlap(self.text, stop) for stop in self.stops), default=0)
        elif self.stop is None and self._read < len(self._ids):
            self.text += self._decode(self._ids[self._context :])[
                len(self._decode(self._ids[self._context : self._read])) :
            ]
            self._read = len(self._ids)
            end = len(self.text)
        new = self.text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return new

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=self.skip_special)) if ids else ""


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
