"""`atropos status`: what a rollout server is doing, as a table.

atropos status                                   http://127.0.0.1:8000, once
atropos status --url http://host:9000 --watch    again every two seconds
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from atroposlib.api.client_http import SyncHttp, describe
from atroposlib.errors import AtroposError, RolloutServerUnavailableError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="atropos status", description="Show queue, batches, environments and trainer of a rollout server."
    )
    p.add_argument(
        "--url",
        default=os.environ.get("ATROPOS_URL", "http://127.0.0.1:8000"),
        help="the rollout server (default: %(default)s)",
    )
    p.add_argument(
        "--token", default=os.environ.get("ATROPOS_TOKEN"), help="its token (or the environment variable ATROPOS_TOKEN)"
    )
    p.add_argument("--watch", action="store_true", help="show it again every --interval seconds")
    p.add_argument(
        "--interval", type=float, default=2.0, help="seconds between two looks, which is also what rates are taken over"
    )
    p.add_argument("--json", action="store_true", help="print what the server says, as JSON")
    return p


def fetch(url: str, token: str | None) -> dict[str, Any]:
    """The server's own account of itself."""
    http = SyncHttp(url, token=token, timeout_s=10.0)
    try:
        return http.request("GET", "/overview").checked(f"{url}/overview")
    except OSError as error:
        raise RolloutServerUnavailableError(
            f"no rollout server answers on {url} ({describe(error)}); start one with run-api, or give --url"
        ) from error
    finally:
        http.close()


def rates(before: dict[str, Any] | None, now: dict[str, Any], seconds: float) -> dict[str, tuple[float, float]]:
    """Groups and tokens per second by environment, between two looks (since the server started, without an earlier one)."""
    if before is None:
        span = max(1e-9, now["uptime_s"])
        return {
            env["name"]: (env["groups_since_start"] / span, env["tokens_since_start"] / span)
            for env in now["environments"]
        }
    earlier = {env["name"]: (env["groups"], env["tokens"]) for env in before["environments"]}
    span, result = max(1e-9, seconds), {}
    for env in now["environments"]:
        groups, tokens = earlier.get(env["name"], (0, 0))
        result[env["name"]] = (max(0, env["groups"] - groups) / span, max(0, env["tokens"] - tokens) / span)
    return result


def render(now: dict[str, Any], speed: dict[str, tuple[float, float]], url: str) -> str:
    """The whole page as text."""
    queue, batches, trainer = now["queue"], now["batches"], now["trainer"]
    lines = [
        f"rollout server {url}  up {_span(now['uptime_s'])}  {'durable' if now['durable'] else 'in memory'}",
        f"queue     {queue['groups']} groups, {queue['sequences']} sequences, {_bytes(queue['bytes'])}"
        + (f", {queue['buffered_sequences']} sequences in pieces" if queue["buffered_sequences"] else "")
        + (f", {queue['oversized_groups']} groups too large for any batch" if queue["oversized_groups"] else ""),
        f"batches   last {batches['last_formed']}, committed {batches['committed']}, unacknowledged {batches['unacknowledged']}, kept {batches['retained']}",
        "trainer   not registered"
        if trainer is None
        else f"trainer   step {trainer['step']} of {trainer['num_steps']}, batch size {trainer['batch_size']}"
        + ("" if trainer["started"] else ", has not asked for a batch yet"),
        "",
    ]
    rows = [
        (
            "id",
            "environment",
            "state",
            "groups",
            "groups/s",
            "tokens/s",
            "last group",
            "silent",
            "queued",
            "weight",
            "minimum",
        )
    ]
    for env in now["environments"]:
        groups, tokens = speed.get(env["name"], (0.0, 0.0))
        rows.append(
            (
                str(env["env_id"]),
                env["name"],
                "alive" if env["alive"] else "gone",
                str(env["groups"]),
                f"{groups:.2f}",
                f"{tokens:.0f}",
                "-" if env["last_group_s"] is None else _span(env["last_group_s"]),
                _span(env["silent_s"]),
                str(env["queued_sequences"]),
                f"{env['weight']:.2f}",
                "-" if env["min_batch_allocation"] is None else f"{env['min_batch_allocation']:.0%}",
            )
        )
    if len(rows) == 1:
        return "\n".join([*lines, "no environments"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        [
            *lines,
            *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
        ]
    )


def _span(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _show(before: dict[str, Any] | None, now: dict[str, Any], seconds: float, url: str) -> None:
    print(render(now, rates(before, now, seconds), url), flush=True)


def _watch(before: dict[str, Any] | None, url: str, options: argparse.Namespace) -> None:
    """Until somebody has seen enough."""
    looked = time.monotonic()
    while True:
        time.sleep(max(0.1, options.interval))
        try:
            now = fetch(url, options.token)
        except RolloutServerUnavailableError as error:  # it may come back, with counts of its own
            print(f"\natropos status: {error}; looking again", file=sys.stderr, flush=True)
            before = None
            continue
        print()
        _show(before, now, time.monotonic() - looked, url)
        before, looked = now, time.monotonic()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `atropos status`."""
    options = parser().parse_args(argv)
    url = options.url.rstrip("/")
    try:
        first = fetch(url, options.token)
        if options.json:
            import json

            print(json.dumps(first, indent=2))
            return 0
        _show(None, first, 0.0, url)
        if options.watch:
            _watch(first, url, options)
    except KeyboardInterrupt:
        return 130
    except AtroposError as error:
        print(f"atropos status: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
