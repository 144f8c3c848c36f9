"""The rollout server's HTTP face: `create_app(service)` and `app`.

Each route parses, calls one method of the service and answers. The hot routes live in `atroposlib.api.hot_routes` and are listed
here for the OpenAPI page. `app` is made from the environment variables ATROPOS_DATA_DIR and ATROPOS_TOKEN and keeps everything
in memory unless a data folder is named; `run-api` makes its own with the options it was given.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from atroposlib import __version__
from atroposlib.api import binary, native_scan
from atroposlib.api.environments import MIN_ENV_WEIGHT
from atroposlib.api.hot_routes import HOT_PATHS, HotRoutes
from atroposlib.api.journal import Durability, Journal
from atroposlib.api.metrics_page import prometheus_text
from atroposlib.api.middleware import (
    ASGIApp,
    BodyLimits,
    GZipRequestMiddleware,
    Receive,
    Scope,
    Send,
    TokenMiddleware,
    header,
    is_loopback,
)
from atroposlib.api.observer import StoreObserver
from atroposlib.api.protocol import RolloutConnection, protocol_for
from atroposlib.api.schemas import (
    BINARY_TYPE,
    EMPTY_EXAMPLE,
    GROUP_FIELDS,
    BatchAck,
    BatchCommit,
    EnvIdentifier,
    Info,
    MetricsReport,
    RegisterEnv,
    Registration,
    ScoredData,
    Status,
)
from atroposlib.api.service import RolloutService
from atroposlib.api.store import RolloutStore
from atroposlib.api.wire import WireError
from atroposlib.errors import JournalError

__all__ = [
    "MIN_ENV_WEIGHT",
    "EnvIdentifier",
    "GZipRequestMiddleware",
    "Info",
    "RegisterEnv",
    "Registration",
    "ScoredData",
    "ServerSettings",
    "Status",
    "app",
    "build_app",
    "create_app",
    "front_door",
]


@dataclass(kw_only=True, slots=True)
class ServerSettings:
    """How to run a rollout server."""

    data_dir: Path | None = None
    """Where the journal lives; None keeps everything in memory."""
    durability: Durability = "safe"
    token: str | None = None
    max_body_bytes: int = 512 * 2**20
    env_timeout_s: float = 60.0
    cors_origins: list[str] = field(default_factory=list)
    compress: bool | None = None
    segment_bytes: int = 256 * 2**20
    min_free_bytes: int = 64 * 2**20
    retain_bytes: int | None = None
    """Bytes of acknowledged, uncommitted batches kept for a trainer that resumes (default 64 GiB on disk, 512 MiB in memory)."""


def build_app(settings: ServerSettings, *, observers: Sequence[StoreObserver] = ()) -> FastAPI:
    """A rollout server with these settings."""
    retain = settings.retain_bytes
    if retain is None:
        retain = 512 * 2**20 if settings.data_dir is None else 64 * 2**30
    store = RolloutStore(observers=observers, env_timeout_s=settings.env_timeout_s, retain_bytes=retain)
    journal = None
    if settings.data_dir is not None:
        journal = Journal(
            settings.data_dir,
            durability=settings.durability,
            segment_bytes=settings.segment_bytes,
            min_free_bytes=settings.min_free_bytes,
        )
    return create_app(RolloutService(store, journal), settings)


def create_app(service: RolloutService | RolloutStore, settings: ServerSettings | None = None) -> FastAPI:
    """The HTTP application of a service (or of a bare store: in memory)."""
    settings = settings or ServerSettings()
    service = service if isinstance(service, RolloutService) else RolloutService(service)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(native_scan.prepare)
        await service.open()
        try:
            yield
        finally:
            await service.close()

    api = FastAPI(title="AtroposLib API", version=__version__, lifespan=lifespan, description=DESCRIPTION)
    api.state.service, api.state.settings = service, settings
    api.state.requests = {}  # (path, status) -> [count, seconds], for /metrics
    limits = BodyLimits(max_bytes=settings.max_body_bytes, max_decoded_bytes=4 * settings.max_body_bytes)
    _add_errors(api)
    _add_trainer_routes(api, service)
    _add_env_routes(api, service)
    _add_seen_routes(api, service)
    _document_hot_routes(api)
    # The last one added is the outermost: CORS (a pre-flight carries no token), token, hot routes, request bodies for the rest.
    api.add_middleware(GZipRequestMiddleware, limits=limits)
    api.add_middleware(
        HotRoutes, service=service, limits=limits, compress=settings.compress, requests=api.state.requests
    )
    if settings.token:
        api.add_middleware(TokenMiddleware, token=settings.token)
    if settings.cors_origins:
        api.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return api


def front_door(api: FastAPI) -> tuple[ASGIApp, type[RolloutConnection]]:
    """The same application with the hot routes answered before the framework's layers see them, and its connection protocol.

    What `run-api` gives to uvicorn. Behaves as `api` does; a request that CORS has to look at takes the long way.
    """
    settings: ServerSettings = api.state.settings
    service: RolloutService = api.state.service
    limits = BodyLimits(max_bytes=settings.max_body_bytes, max_decoded_bytes=4 * settings.max_body_bytes)
    hot = HotRoutes(api, service, limits, compress=settings.compress, requests=api.state.requests)
    gate = TokenMiddleware(hot, settings.token) if settings.token else hot

    async def enter(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in HOT_PATHS and not header(scope, b"origin"):
            await gate(scope, receive, send)
        else:
            await api(scope, receive, send)

    return enter, protocol_for(hot, settings.token)


DESCRIPTION = f"""Environments post scored groups, the trainer takes batches.

1. The trainer calls `/register`, then asks `/batch` until it gets one.
2. Environments call `/register-env` (again and again while it says *wait for trainer to start*), then `/scored_data`.
3. `/batch` hands out batches of exactly `batch_size` sequences, oldest first. Plain clients acknowledge a batch by asking for the
   next. With `?client=ours&after=SEQ` the reply carries `batch_seq`; `/ack` and `/commit` say what was used and what a checkpoint holds.

Request bodies may be gzip or zstd. Besides JSON, groups can be posted and batches read as `{BINARY_TYPE}`. A group may carry a
`group_id`: the same id twice is stored once and answered the same. Refusals are 4xx with `detail` saying what, where and what to do;
507 means the disk is full (send it again later).

Group sizes: a group of its environment's `group_size` is queued at once; other sizes are held until they add up to whole groups
(reply `buffered`). A group with more sequences than a batch holds is refused.
"""


def _add_errors(api: FastAPI) -> None:
    @api.exception_handler(WireError)
    async def refused(_: Request, error: WireError) -> JSONResponse:
        return JSONResponse({"detail": error.detail}, error.status)

    @api.exception_handler(JournalError)
    async def disk(_: Request, error: JournalError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 507)

    @api.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        detail = [
            {"loc": list(e["loc"]), "msg": e["msg"], "type": e["type"], "input": repr(e.get("input"))[:80]}
            for e in error.errors()
        ]
        return JSONResponse({"detail": detail}, 422)


def _add_trainer_routes(api: FastAPI, service: RolloutService) -> None:
    store = service.store

    @api.post("/register", tags=["trainer"])
    async def register(registration: Registration) -> dict[str, Any]:
        """A trainer announces itself; doing so again replaces its settings."""
        await service.register(registration)
        return {"uuid": secrets.randbits(128)}

    @api.get("/wandb_info", tags=["trainer"])
    async def wandb_info() -> dict[str, Any]:
        """Where the trainer logs; null before it registered."""
        r = store.registration
        return {"group": r.wandb_group if r else None, "project": r.wandb_project if r else None}

    @api.get("/info", tags=["trainer"])
    async def info() -> dict[str, int]:
        """Batch size and longest sequence; -1 before a trainer registered."""
        return {
            "batch_size": store.registration.batch_size if store.registration else -1,
            "max_token_len": store.max_token_len,
        }

    @api.post("/ack", tags=["trainer"])
    async def ack(request: BatchAck) -> dict[str, Any]:
        """The trainer has used this batch and all before it."""
        return {"status": "success", "acknowledged": await service.ack(request.batch_seq)}

    @api.post("/commit", tags=["trainer"])
    async def commit(request: BatchCommit) -> dict[str, Any]:
        """The trainer's checkpoint contains this batch and all before it."""
        await service.commit(request.batch_seq, request.step)
        return {"status": "success", "committed": store.ledger.committed}

    @api.post("/report", tags=["seen"])
    async def report(request: MetricsReport) -> dict[str, str]:
        """Numbers for the live page, from any process."""
        service.report(request.source, request.step, request.time, request.metrics)
        return {"status": "success"}

    async def reset(request: Request) -> Response:
        if request.method == "GET" and not is_loopback(request.scope):
            return JSONResponse({"detail": "from another machine, /reset_data takes POST only"}, 405)
        await service.reset()
        return PlainTextResponse("Reset successful")

    api.add_api_route(
        "/reset_data",
        reset,
        methods=["POST", "GET"],
        tags=["trainer"],
        response_class=PlainTextResponse,
        include_in_schema=False,
    )


def _add_env_routes(api: FastAPI, service: RolloutService) -> None:
    store = service.store

    @api.post("/register-env", tags=["environment"])
    async def register_env(request: RegisterEnv) -> dict[str, Any]:
        """An environment announces itself; one that was gone gets its id and name back."""
        env = await service.register_env(request)
        registration = store.registration
        if env is None or registration is None:
            return {"status": "wait for trainer to start"}
        return {
            "status": "success",
            "env_id": env.env_id,
            "wandb_name": env.wandb_name,
            "checkpoint_dir": registration.checkpoint_dir,
            "starting_step": store.current_step,
            "checkpoint_interval": registration.save_checkpoint_interval,
            "num_steps": registration.num_steps,
        }

    @api.post("/disconnect-env", tags=["environment"])
    async def disconnect_env(request: EnvIdentifier) -> dict[str, Any]:
        """An environment leaves: it stops counting."""
        if await service.disconnect_env(request.env_id):
            return {"status": "success"}
        return {"status": "failure", "error": f"environment {request.env_id} is not known here"}

    @api.post("/heartbeat", tags=["environment"])
    async def heartbeat(request: EnvIdentifier) -> Response:
        """An environment is alive though it has nothing to say."""
        if store.envs.touch(request.env_id) is None:
            detail = f"environment {request.env_id} is not known here; register it with POST /register-env"
            return JSONResponse({"detail": detail}, 404)
        return JSONResponse({"status": "success"})

    @api.get("/latest_example", tags=["seen"])
    def latest_example() -> Response:
        """The group that was queued last."""
        latest = store.latest
        if latest is None:
            return JSONResponse(EMPTY_EXAMPLE)
        payload = latest.payload
        if payload is None and service.journal is not None:
            payload = service.journal.read(latest.location)
        return Response(binary.to_json(payload or b"") if latest.binary else payload, media_type="application/json")


def _add_seen_routes(api: FastAPI, service: RolloutService) -> None:
    @api.get("/", tags=["seen"])
    async def root() -> dict[str, str]:
        """Says who is here."""
        return {"message": "AtroposLib API"}

    @api.get("/healthz", tags=["seen"])
    async def healthz() -> dict[str, Any]:
        """The server is up. Needs no token and tells no data."""
        return {
            "status": "ok",
            "version": __version__,
            "formats": ["application/json", BINARY_TYPE],
            "time": time.time(),
        }

    @api.get("/overview", tags=["seen"])
    async def overview() -> dict[str, Any]:
        """What `atropos status` shows."""
        return service.overview()

    @api.get("/metrics", tags=["seen"], response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Counters and gauges for Prometheus."""
        text = prometheus_text(service, api.state.requests)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _scored_data_to_dict(scored_data: ScoredData) -> dict[str, Any]:
    """A group as it is in a batch; kept for code that imports it from here."""
    return {name: getattr(scored_data, name) for name in GROUP_FIELDS}


def _document_hot_routes(api: FastAPI) -> None:
    """Entries on the OpenAPI page; the requests themselves are answered before they come here."""

    def answered_elsewhere() -> None:
        """Never called."""

    body = {"application/json": {"schema": ScoredData.model_json_schema()}}
    many = {"application/json": {"schema": {"type": "array", "items": ScoredData.model_json_schema()}}}
    pages: list[tuple[str, str, str, str, dict[str, Any]]] = [
        ("POST", "/scored_data", "environment", "Store one scored group.", {"requestBody": {"content": body, "required": True}}),
        ("POST", "/scored_data_list", "environment", "Store several scored groups; all or none.", {"requestBody": {"content": many, "required": True}}),
        ("GET", "/batch", "trainer", "The next batch, or null while there is none. `client=ours&after=SEQ` for explicit acknowledgement.", {}),
        ("GET", "/status", "seen", "Step and queued groups.", {}),
        ("GET", "/status-env", "environment", "The queue as one environment sees it (`env_id` as query parameter or JSON body).", {}),
    ]  # fmt: skip
    for method, path, tag, summary, extra in pages:
        api.add_api_route(
            path,
            answered_elsewhere,
            methods=[method],
            tags=[tag],
            summary=summary,
            description=summary,
            openapi_extra=extra,
        )


def _from_environment() -> ServerSettings:
    folder = os.environ.get("ATROPOS_DATA_DIR")
    return ServerSettings(data_dir=Path(folder) if folder else None, token=os.environ.get("ATROPOS_TOKEN"))


app = build_app(_from_environment())
