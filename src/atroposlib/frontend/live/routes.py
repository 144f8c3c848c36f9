"""Routes of the live page, for the rollout server (`add_live_routes`) and for a finished run (`create_view_app`).

The page itself (`/live` and its files) holds no data and is served to anybody the server lets in; everything it shows
comes from `/live/api/...`, which follows the server's token rule. A token is given to the page as `/live#token=...`.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Response
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse

from atroposlib.api.middleware import PAGE_FILES
from atroposlib.api.run_log import RunLog
from atroposlib.frontend.live.history import GroupFilter, RunHistory

HERE = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
CONTENT_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'"
TOKENIZER_VARIABLE = "ATROPOS_PAGE_TOKENIZER"


def add_live_routes(app: FastAPI, run_log: RunLog | str | Path) -> None:
    """Serve the page and its data under `/live` of ``app``."""
    history = RunHistory(run_log.path if isinstance(run_log, RunLog) else run_log)
    live = isinstance(run_log, RunLog)
    app.get("/live", include_in_schema=False)(_file_route(HERE / "index.html"))
    for name in PAGE_FILES:
        app.get(f"/live/{name}", include_in_schema=False)(_file_route(HERE / name))

    @app.get("/live/api/overview", include_in_schema=False)
    def overview(after: int = 0) -> Response:
        return JSONResponse(history.overview(after=after) | {"live": live})

    @app.get("/live/api/groups", include_in_schema=False)
    def groups(
        env: str | None = None,
        min_score: float | None = None,
        max_score: float | None = None,
        step: int | None = None,
        before: int | None = None,
        limit: int = 50,
    ) -> Response:
        wanted = GroupFilter(env=env, min_score=min_score, max_score=max_score, step=step, before=before, limit=limit)
        return JSONResponse([group | {"live": live} for group in history.groups(wanted)])

    @app.get("/live/api/groups/{key}", include_in_schema=False)
    def group(key: int) -> Response:
        found = history.group(key)
        if found is None:
            raise HTTPException(404, f"no group {key} in this run")
        if found["content"]:
            found["token_texts"] = token_texts(found["content"]["tokens"], history.meta().get("tokenizer"))
        return JSONResponse(found | {"live": live})

    @app.get("/live/api/trace/step/{step}", include_in_schema=False)
    def trace_step(step: int) -> Response:
        return _found(history.trace_step(step), f"no batch of this run trained step {step}")

    @app.get("/live/api/trace/sample/{sample_id:path}", include_in_schema=False)
    def trace_sample(sample_id: str) -> Response:
        return _found(history.trace_sample(sample_id), f"no sample {sample_id!r} in this run")


def create_view_app(run_log: Path) -> FastAPI:
    """The page for a finished (or foreign) run."""
    app = FastAPI(title="Atropos run", docs_url=None, redoc_url=None, openapi_url=None)
    add_live_routes(app, run_log)
    app.get("/", include_in_schema=False)(lambda: RedirectResponse("/live"))
    return app


def _found(value: dict[str, Any] | None, otherwise: str) -> Response:
    if value is None:
        raise HTTPException(404, otherwise)
    return JSONResponse(value)


def _file_route(file: Path) -> Any:
    def serve() -> FileResponse:
        headers = {
            "Content-Security-Policy": CONTENT_POLICY,
            "Cache-Control": "no-cache",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return FileResponse(file, media_type=TYPES[file.suffix], headers=headers)

    return serve


def token_texts(tokens: list[list[int]], tokenizer: str | None) -> list[list[str]] | None:
    """The text of every token, when the run names a tokenizer file; None otherwise."""
    reader = _tokenizer(tokenizer or os.environ.get(TOKENIZER_VARIABLE, ""))
    if reader is None:
        return None
    return [[reader.decode([token], skip_special_tokens=False) for token in row] for row in tokens]


@lru_cache(maxsize=4)
def _tokenizer(path: str) -> Any:
    file = Path(path) / "tokenizer.json" if path and Path(path).is_dir() else Path(path)
    if not path or not file.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))
