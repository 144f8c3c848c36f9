"""Reading HTTP replies with errors that name the address, the status and the beginning of the body."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)
BODY_HEAD = 300


async def parse_http_response(resp: Any, logger: logging.Logger | None = logger) -> Any:
    """The JSON body of an aiohttp reply; a bad status or body is logged with its address and raised again."""
    try:
        resp.raise_for_status()
        return await resp.json()
    except Exception as error:  # every kind is only described here and passed on
        if logger is not None:
            logger.error("%s", await _describe(resp, error))
        raise


async def _describe(resp: Any, error: Exception) -> str:
    try:
        body = str(await resp.text())[:BODY_HEAD]
    except Exception:  # the body may be gone after a failed read; the rest of the sentence still helps
        body = "unreadable"
    return f"{getattr(resp, 'url', 'reply')} answered {getattr(resp, 'status', '?')}: {error!r}; body: {body}"
