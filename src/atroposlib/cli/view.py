"""`atropos view RUN_DIR`: the live page for a finished run."""

from __future__ import annotations

import argparse
from pathlib import Path

from atroposlib.errors import ConfigError


def main(argv: list[str]) -> int:
    """Serve the page of a run until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="atropos view", description="Show the page of a finished run.")
    parser.add_argument("run_dir", type=Path, help="folder of a run, or its run_log.sqlite")
    parser.add_argument("--port", type=int, default=8010, help="loopback port (default 8010; 0 takes any free one)")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser window")
    arguments = parser.parse_args(argv)

    import socket

    import uvicorn

    from atroposlib.api.run_log import read_run_log
    from atroposlib.frontend.live.routes import create_view_app

    try:
        read_run_log(arguments.run_dir).close()
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    try:
        listener = socket.create_server(("127.0.0.1", arguments.port))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on port {arguments.port} ({error}); choose another --port, or 0") from error
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/live"
    print(f"{arguments.run_dir}: {address}  (Ctrl-C ends it)", flush=True)
    if not arguments.no_browser:
        import webbrowser

        webbrowser.open(address)
    server = uvicorn.Server(uvicorn.Config(create_view_app(arguments.run_dir), log_level="warning"))
    server.run(sockets=[listener])
    return 0
