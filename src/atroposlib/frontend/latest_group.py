"""A local page that shows the newest group a rollout server received.

The page asks this process every two seconds; this process asks the rollout server. What models wrote is rendered as text
(``jsonl2html``), and the page may load nothing from anywhere else.
"""

from __future__ import annotations

import asyncio
import html
import json
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from atroposlib.frontend.jsonl2html import create_html_for_group, render_image

logger = logging.getLogger(__name__)

Decode = Callable[[list[int]], str]
FetchGroup = Callable[[], Mapping[str, Any] | None]

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; img-src data:",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
_SCRIPT = """
let last = null;
async function refresh() {
  try {
    const reply = await fetch("latest");
    const text = await reply.text();
    if (text !== last) { last = text; document.getElementById("group").innerHTML = text; }
    document.getElementById("state").textContent = "";
  } catch (error) { document.getElementById("state").textContent = "the viewer is not running"; }
}
refresh();
setInterval(refresh, 2000);
"""


def fetch_latest(api_url: str, *, timeout_s: float = 10.0) -> Mapping[str, Any] | None:
    """The newest group of the rollout server at ``api_url``; None when there is none yet."""
    group = fetch_json(f"{api_url.rstrip('/')}/latest_example", timeout_s=timeout_s)
    return group if group.get("tokens") else None


def fetch_json(url: str, *, timeout_s: float = 10.0) -> dict[str, Any]:
    """``GET url`` of a rollout server as a JSON object, with the token of ATROPOS_TOKEN if there is one."""
    token = os.environ.get("ATROPOS_TOKEN")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            value = json.load(reply)
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        error.close()
        problem = "does not take this token" if token else "needs a token"
        raise PermissionError(f"{url} {problem}; set ATROPOS_TOKEN") from None
    if not isinstance(value, dict):
        raise ValueError(f"{url} answered {type(value).__name__}, not an object")
    return value


def render_group(group: Mapping[str, Any] | None, decode: Decode | None, *, show_images: bool = False) -> str:
    """The newest group as HTML; sequences without messages are decoded from their tokens."""
    if not group:
        return "<p>No group yet.</p>"
    messages = group.get("messages") or [_decoded(tokens, decode) for tokens in group.get("tokens") or []]
    page = create_html_for_group({"messages": messages, "scores": group.get("scores")}, 0)
    images = group.get("images") if show_images else None
    pictures = images if isinstance(images, list) else [images] if images else []
    return "".join(render_image(_first(picture)) for picture in pictures if picture) + page


def _first(picture: Any) -> Any:
    return picture[0] if isinstance(picture, list) and picture else picture


def _decoded(tokens: list[int], decode: Decode | None) -> str:
    return decode(tokens) if decode else f"{len(tokens)} tokens: {tokens[:200]}"


def create_viewer_app(fetch: FetchGroup, decode: Decode | None, *, title: str, show_images: bool = False) -> Any:
    """The viewer as a FastAPI application; ``fetch`` blocks and runs in a thread."""
    from fastapi import FastAPI
    from fastapi.responses import HTMLResponse, PlainTextResponse, Response

    from atroposlib.frontend.jsonl2html import TEMPLATE_FILE

    app = FastAPI(title=title, docs_url=None, redoc_url=None, openapi_url=None)
    body = '<p id="state"></p><div id="group"></div><script src="view.js"></script>'
    template = "\n".join(
        line for line in TEMPLATE_FILE.read_text(encoding="utf-8").splitlines() if "Content-Security-Policy" not in line
    )
    page = template.replace("{title}", html.escape(title)).replace("{groups_html}", body)

    @app.get("/")
    async def index() -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    @app.get("/view.js")
    async def script() -> Response:
        return PlainTextResponse(_SCRIPT, media_type="text/javascript", headers=_HEADERS)

    @app.get("/latest")
    async def latest() -> Response:
        try:
            group = await asyncio.to_thread(fetch)
        except (OSError, ValueError) as error:  # URLError is an OSError
            message = f"<p>The rollout server does not answer: {html.escape(str(error))}</p>"
            return HTMLResponse(message, headers=_HEADERS)
        return HTMLResponse(render_group(group, decode, show_images=show_images), headers=_HEADERS)

    return app
