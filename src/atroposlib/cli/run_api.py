"""`run-api`: start the rollout server.

run-api                                   on 127.0.0.1:8000, journal in ./atropos_data
run-api --in-memory --port 9000           nothing on disk
run-api --host 0.0.0.0 --token SECRET     reachable from other machines
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atroposlib.access import KEEP_ALIVE_S, check_bind
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.cli import make_folder
from atroposlib.utils.closed_pipe import ends_with_its_reader

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

logger = logging.getLogger(__name__)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="run-api", description="Start the rollout server.")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    p.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0 picks a free one (default: %(default)s)"
    )
    p.add_argument(
        "--data-dir", type=Path, default=Path("atropos_data"), help="where the journal lives (default: ./%(default)s)"
    )
    p.add_argument("--in-memory", action="store_true", help="keep nothing on disk: a restart loses everything")
    p.add_argument(
        "--durability",
        choices=["safe", "interval", "none"],
        default="safe",
        help="sync before answering, every second, or never",
    )
    p.add_argument(
        "--segment-mb",
        type=float,
        default=256,
        help="size of the journal's files, one of which is kept as a spare (default: %(default)s)",
    )
    p.add_argument(
        "--token", default=None, help="bearer token clients must send (or the environment variable ATROPOS_TOKEN)"
    )
    p.add_argument("--insecure", action="store_true", help="allow other machines in without a token")
    p.add_argument("--max-body-mb", type=float, default=512, help="largest request body (default: %(default)s)")
    p.add_argument(
        "--env-timeout", type=float, default=60.0, help="seconds of silence after which an environment stops counting"
    )
    p.add_argument(
        "--cors-origin", action="append", default=[], metavar="URL", help="let pages from this origin call the server"
    )
    p.add_argument(
        "--compress",
        choices=["auto", "always", "never"],
        default="auto",
        help="compress batches for clients that accept it (default: %(default)s, those on other machines)",
    )
    p.add_argument("--no-live-page", action="store_true", help="keep no run log and serve no page under /live")
    p.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    p.add_argument("--reload", action="store_true", help="accepted for old command lines; has no effect")
    return p


def check(options: argparse.Namespace) -> None:
    """Refuse what would be open to everybody, and numbers that make no sense."""
    check_bind(options.host, token=options.token, insecure=options.insecure)
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port is {options.port}; it must be from 0 (any free one) to 65535")
    if options.env_timeout <= 0:
        raise ConfigError(f"--env-timeout is {options.env_timeout}; it must be more than 0 seconds")
    if options.max_body_mb <= 0:
        raise ConfigError(f"--max-body-mb is {options.max_body_mb}; it must be more than 0")
    if options.segment_mb <= 0:
        raise ConfigError(f"--segment-mb is {options.segment_mb}; it must be more than 0")


def serve(options: argparse.Namespace) -> int:
    """Run the server until it is told to stop."""
    from atroposlib.api.server import ServerSettings, build_app
    from atroposlib.frontend.live.attach import attach_live_page, open_run_log

    if options.reload:
        logger.warning("--reload has no effect: the server reloads nothing")
    settings = ServerSettings(
        data_dir=None if options.in_memory else options.data_dir,
        durability=options.durability,
        segment_bytes=int(options.segment_mb * 2**20),
        token=options.token,
        max_body_bytes=int(options.max_body_mb * 2**20),
        env_timeout_s=options.env_timeout,
        cors_origins=options.cors_origin,
        compress={"auto": None, "always": True, "never": False}[options.compress],
    )
    if settings.data_dir is not None:
        make_folder(settings.data_dir, "--data-dir")
    sock = _listen(options.host, options.port)
    host, port = sock.getsockname()[:2]
    app = build_app(settings)
    if (journal := app.state.service.journal) is not None:
        journal.take_folder()  # before anything in it is opened: another server may be using it
    if not options.no_live_page:
        run_log = open_run_log(settings.data_dir)
        app.state.service.store.observers.append(run_log)
        attach_live_page(app, run_log)
    server = server_for(app, options.log_level)
    where = (
        "in memory"
        if settings.data_dir is None
        else f"journal in {settings.data_dir.resolve()} ({settings.durability})"
    )
    print(f"rollout server on http://{host}:{port} ({where})", flush=True)
    if not options.no_live_page:
        print(f"live page: http://{host}:{port}/live", flush=True)

    def told_to_stop(*_: object) -> None:
        # uvicorn stops in order on the first signal and then raises it once more for us: that one ends nothing.
        if not server.started:
            raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told_to_stop)
    # What is loaded by now stays: the collector need not walk through it again and again while the queue grows.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    try:
        server.run(sockets=[sock])
    finally:
        sock.close()
    return 0 if server.started else 1


def server_for(app: FastAPI, log_level: str) -> uvicorn.Server:
    """A uvicorn server for a rollout application: fast loop and parser, requests logged by us."""
    import uvicorn

    from atroposlib.api.server import front_door

    entry, protocol = front_door(app)
    config = uvicorn.Config(
        entry,
        http=protocol,  # type: ignore[arg-type]  # a BufferedProtocol; uvicorn's hint knows only the plain one
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        log_level=log_level,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=10,
    )
    return uvicorn.Server(config)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port or --host"
        ) from error
    sock.listen(2048)
    return sock


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `atropos api`."""
    options = parser().parse_args(argv)
    options.token = options.token or os.environ.get("ATROPOS_TOKEN") or None
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    check(options)
    return serve(options)


@ends_with_its_reader
def main() -> int:
    """Entry point of `run-api`."""
    try:
        return command()
    except AtroposError as error:
        print(f"run-api: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
