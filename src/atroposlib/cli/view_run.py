"""``view-run``: watch the newest group of a running rollout server on a local page.

When no trainer has registered yet the viewer registers itself and takes batches, so that environments start; beside a
trainer it only looks.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.cli.group_collection import DEFAULT_TOKENIZER
from atroposlib.frontend.latest_group import Decode, create_viewer_app, fetch_json, fetch_latest
from atroposlib.utils.closed_pipe import ends_with_its_reader

logger = logging.getLogger(__name__)


def build_parser(prog: str, tokenizer: str) -> argparse.ArgumentParser:
    """The flags of both viewers."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Watch the newest group of a rollout server on a local page."
    )
    parser.add_argument("--port", type=int, default=9001, help="port of the page")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of the page; the default is reachable from this machine only"
    )
    parser.add_argument("--api-url", default="http://localhost:8000", help="rollout server to watch")
    parser.add_argument(
        "--group-size", type=int, default=2, help="sequences per group, when the viewer has to act as trainer"
    )
    parser.add_argument(
        "--max-token-len", type=int, default=2048, help="longest sequence, when the viewer has to act as trainer"
    )
    parser.add_argument("--tokenizer", default=tokenizer, help="decodes sequences that come without messages")
    parser.add_argument("--watch-only", action="store_true", help="never act as trainer")
    return parser


class StandInTrainer:
    """Takes batches in a thread when no trainer is there, and keeps the newest group."""

    def __init__(self, client: Any, *, group_size: int, max_token_len: int) -> None:
        self.client, self.group_size, self.max_token_len = client, group_size, max_token_len
        self.latest: Mapping[str, Any] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._take, name="view-run-trainer", daemon=True)

    def start(self) -> None:
        """Register and begin to take batches."""
        self.client.register(
            batch_size=self.group_size,
            max_token_len=self.max_token_len,
            num_steps=1_000_000,
            checkpoint_dir="checkpoints",
            save_checkpoint_interval=1_000_000,
            wandb_group="test",
            wandb_project="test",
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop taking batches and close the connection."""
        self._stop.set()
        self._thread.join(timeout=10.0)
        self.client.close()

    def _take(self) -> None:
        while not self._stop.is_set():
            try:
                batch = self.client.next_batch(timeout_s=1.0)
                if batch is not None:
                    self.latest = batch.groups[-1]
                    self.client.ack(batch.seq)
            except Exception:  # a viewer outlives a restarting server; the page says what it cannot show
                logger.exception("could not take a batch")
                self._stop.wait(2.0)


def load_decoder(name: str) -> Decode | None:
    """How to turn token ids into text; None (ids are shown) when the tokenizer cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        logger.warning("cannot load the tokenizer %r (%s); sequences without messages are shown as ids", name, error)
        return None
    return lambda tokens: str(tokenizer.decode([int(token) for token in tokens]))


def trainer_is_missing(api_url: str) -> bool:
    """Whether nobody registered a batch size yet."""
    return int(fetch_json(f"{api_url.rstrip('/')}/info").get("batch_size", -1)) == -1


def run_viewer(argv: Sequence[str] | None, *, prog: str, tokenizer: str, show_images: bool) -> int:
    """Parse, connect, serve the page until interrupted."""
    import uvicorn

    from atroposlib.api.client import TrainerClient

    arguments = build_parser(prog, tokenizer).parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        missing = not arguments.watch_only and trainer_is_missing(arguments.api_url)
    except OSError as error:
        print(
            f"{prog}: no rollout server at {arguments.api_url} ({error}); start one with run-api or pass --api-url",
            file=sys.stderr,
        )
        return 1
    stand_in = None
    if missing:
        stand_in = StandInTrainer(
            TrainerClient(arguments.api_url), group_size=arguments.group_size, max_token_len=arguments.max_token_len
        )
        stand_in.start()

    def fetch() -> Mapping[str, Any] | None:
        return (stand_in.latest if stand_in else None) or fetch_latest(arguments.api_url)

    app = create_viewer_app(
        fetch, load_decoder(arguments.tokenizer), title=f"newest group of {arguments.api_url}", show_images=show_images
    )
    print(f"the page is at http://{arguments.host}:{arguments.port}/ (stop with Ctrl-C)")
    try:
        uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning")
    finally:
        if stand_in:
            stand_in.stop()
    return 0


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``view-run``."""
    return run_viewer(argv, prog="view-run", tokenizer=DEFAULT_TOKENIZER, show_images=False)


if __name__ == "__main__":
    sys.exit(main())
