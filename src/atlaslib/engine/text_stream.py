"""Text out of a growing list of token ids, piece by piece, without ever taking a character back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns the tokens of one streamed reply into text deltas.

    Held back: the bytes of an unfinished character, and a tail that could still become a stop string.
    """

    def __init__(self, tokenizer: Any, *, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._stop, self._skip = tokenizer, tuple(stop), skip_special_tokens
        self._ids: list[int] = []
        self._start = self._read = 0  # decode a short window, not the whole reply
        self.text = ""
        self._num_sent = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens."""
        self._ids.extend(token_ids)
        known = self._decode(self._start, self._read)
        window = self._decode(self._start, len(self._ids))
        if len(window) > len(known) and not window.endswith(_INCOMPLETE):
            self.text += window[len(known) :]
            self._start, self._read = self._read, len(self._ids)
        return self._send_up_to(len(self.text) - self._held_back())

    def finish(self, final_text: str) -> str:
        """The rest, once the whole text (cut at its stop string) is known."""
        self.text = final_text
        return self._send_up_to(len(final_text))

    def _send_up_to(self, end: int) -> str:
        delta = self.text[self._num_sent : end]
        self._num_sent = max(self._num_sent, end)
        return delta

    def _held_back(self) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(1, min(len(stop), len(self.text)) + 1):
                if self.text.endswith(stop[:size]):
                    longest = max(longest, size)
        return longest

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip)
        return text
