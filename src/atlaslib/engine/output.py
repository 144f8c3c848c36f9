"""What leaves the engine: completions, streamed parts, stop strings, prompt log-probs."""

from __future__ import annotations

import logging
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from atlaslib.engine.sequence import Request, Sequence, SlotTable
from atlaslib.engine.text import TextStream

logger = logging.getLogger(__name__)


class Ending(NamedTuple):
    """Why a reply ended, and the stop token or stop string that ended it."""

    reason: str
    stop: int | str | None


class ScoredRows(NamedTuple):
    """Log-probs of the prompt tokens [first, first + rows) of one request."""

    request: Request
    first: int
    logprobs: Tensor  # [rows]
    top_ids: Tensor | None  # [rows, k]
    top_logprobs: Tensor | None


class Outputs:
    """Turns rows of the table into what callers get."""

    def __init__(self, table: SlotTable, tokenizer: Any) -> None:
        self.table, self.tokenizer = table, tokenizer
        self._texts: dict[Sequence, TextStream] = {}

    def look(self, seq: Sequence, count: int, ending: Ending | None) -> Ending | None:
        """After token `count` of a watched or ending sample: did a stop string end it?"""
        if self.tokenizer is None or not self.table.watched[seq.slot]:
            return ending
        text = self._text_of(seq)
        new = self.table.out[0][seq.slot, text.num_tokens : count].tolist()
        if ending is not None and not seq.params.include_stop_str_in_output:
            new = new[:-1]  # a stop token is in the ids, not in the text
        found = text.push(new, search=count >= seq.params.min_tokens)
        return ending or (Ending("stop", found) if found is not None else None)

    def _text_of(self, seq: Sequence) -> TextStream:
        if seq not in self._texts:
            params = seq.params
            self._texts[seq] = TextStream(
                self.tokenizer,
                stops=params.stop,
                skip_special=params.skip_special_tokens,
                keep_stop=params.include_stop_str_in_output,
            )
        return self._texts[seq]

    def stream(self, seq: Sequence, count: int, ending: Ending | None = None) -> None:
        """Hand the new part of a reply to the request's callback."""
        if seq.request.on_tokens is None:
            return
        part = self.table.part(seq, seq.num_streamed, count)
        if seq.num_streamed == 0:
            part.prompt_logprobs, part.prompt_top_logprobs = (
                seq.request.prompt_logprobs,
                seq.request.prompt_top_logprobs,
            )
        if self.tokenizer is not None:
            part.text = self._text_of(seq).take(final=ending is not None)
        if ending is not None:
            part.finish_reason, part.stop_reason = ending
        seq.num_streamed = count
        _call(seq, part)

    def complete(self, seq: Sequence, count: int, ending: Ending) -> None:
        """The whole reply goes to the request; the last one resolves its future."""
        request = seq.request
        completion = self.table.part(seq, 0, count)
        completion.finish_reason, completion.stop_reason = ending
        completion.prompt_logprobs, completion.prompt_top_logprobs = (
            request.prompt_logprobs,
            request.prompt_top_logprobs,
        )
        if seq.slot >= 0:
            self.stream(seq, count, ending)
        completion.text = self._final_text(seq, count, ending)
        request.completions[seq.index] = completion
        if len(request.completions) == request.params.n:
            with suppress(InvalidStateError):  # cancelled in the meantime
                request.future.set_result([request.completions[index] for index in range(request.params.n)])

    def _final_text(self, seq: Sequence, count: int, ending: Ending) -> str | None:
        if self.tokenizer is None:
            return None
        stream = self._texts.pop(seq, None)
        if stream is not None:
            stream.take(final=True)
            return stream.text
        if isinstance(ending.stop, int) and not seq.params.include_stop_str_in_output:
            count -= 1
        token_ids = self.table.out[0][seq.slot, :count]  # an array is decoded in 2/3 of the time of a list
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=seq.params.skip_special_tokens))


def _call(seq: Sequence, part: Any) -> None:
    assert seq.request.on_tokens is not None
    try:
        seq.request.on_tokens(seq.index, part)
    except Exception:  # a caller's callback must not stop the other requests' step
        logger.exception("on_tokens of sample %d failed; the reply goes on without streaming", seq.index)
        seq.request.on_tokens = None


def note_top_logprobs(seq: Sequence, ids: Tensor, logprobs: Tensor) -> None:
    count = seq.params.logprobs
    seq.top_logprobs.append(dict(zip(ids[:count].tolist(), logprobs[:count].tolist(), strict=True)))


def collect_scores(scored: ScoredRows) -> None:
    """Put the log-probs of some prompt tokens where they belong."""
    request = scored.request
    if request.prompt_logprobs is None or scored.first == 1:
        request.prompt_logprobs = [0.0]
        request.prompt_top_logprobs = [{}] if request.params.prompt_logprobs else None
    request.prompt_logprobs[scored.first :] = scored.logprobs.tolist()
    if request.prompt_top_logprobs is not None and scored.top_ids is not None and scored.top_logprobs is not None:
        pairs = zip(scored.top_ids.tolist(), scored.top_logprobs.tolist(), strict=True)
        request.prompt_top_logprobs[scored.first :] = [dict(zip(*pair, strict=True)) for pair in pairs]
