"""The engine in a thread of its own: submit from anywhere, get futures; what the policy server stands on."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from atlaslib.engine.config import SamplingParams
from atlaslib.engine.engine import Engine
from atlaslib.engine.sequence import Completion, Request, TokenCallback
from atlaslib.errors import EngineStoppedError

logger = logging.getLogger(__name__)


class EngineThread:
    """Owns the step loop. Consumes: submitted requests. Waits for: a submission, when the engine is idle.

    A future that is cancelled before it is done frees its slot at the next step (`future.cancel()`).
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._open: set[Request] = set()
        self._open_lock = threading.Lock()
        self.error: BaseException | None = None

    def start(self) -> EngineThread:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="atropos-engine", daemon=True)
            self._thread.start()
        return self

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams | None = None,
        on_tokens: TokenCallback | None = None,
    ) -> Future[list[Completion]]:
        """A wrong request raises EngineInputError here; a good one runs as soon as there is room.

        `on_tokens(sample_index, part)` is called in the engine's thread for every new part of a reply: `part` is a
        Completion with only the new tokens and text, its `finish_reason` is set in the last one.
        """
        return self._submit(self.engine.make_request(prompt_ids, params or SamplingParams(), on_tokens=on_tokens))

    def submit_score(self, token_ids: list[int], *, temperature: float = 1.0) -> Future[list[Completion]]:
        """Like Engine.score for one sequence; the completion's `prompt_logprobs` holds the result."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        return self._submit(self.engine.make_request(token_ids, params, score_temperature=temperature))

    def _submit(self, request: Request) -> Future[list[Completion]]:
        if self.error is not None or (self._stop.is_set() and self._thread is not None):
            raise EngineStoppedError(f"the engine thread has ended: {self.error or 'stop() was called'}")
        with self._open_lock:
            self._open.add(request)
        request.future.add_done_callback(lambda future: self._done(request, future))
        self.engine.enqueue(request)
        self._wake.set()
        return request.future

    def _done(self, request: Request, future: Future[list[Completion]]) -> None:
        with self._open_lock:
            self._open.discard(request)
        if future.cancelled():
            self.engine.cancel(request)
            self._wake.set()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End after the step in progress; open requests fail with EngineStoppedError."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._fail_open(EngineStoppedError("the engine thread was stopped before the request was done"))

    def _loop(self) -> None:
        try:
            while not self._stop.is_set():
                self._wake.clear()
                if not self.engine.step():
                    self._wake.wait(timeout=0.05)
        except BaseException as error:  # the loop's end is everybody's end: say so in every future
            logger.exception("the engine thread failed")
            self.error = error
            self._fail_open(error)

    def _fail_open(self, error: BaseException) -> None:
        with self._open_lock:
            still_open = list(self._open)
        for request in still_open:
            self.engine.cancel(request)
            with suppress(InvalidStateError):  # done in the meantime
                request.future.set_exception(error)
