"""The chat and completion routes of the OpenAI API, shared by every backend that serves them.

Replies are the types of the ``openai`` package; requests go over this library's own pooled client, so a policy version
or any other extra field of a reply is kept, and an error carries the status and the head of the body.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.api_server import APIServer
from atroposlib.envs.server_handling.policy_versions import note_reply_versions
from atroposlib.envs.server_handling.server_config import OFFICIAL_API_HOST, OFFICIAL_API_URL
from atroposlib.errors import ConfigError
from atroposlib.utils.gathering import gather_or_cancel

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 5.0


def chat_completion_from(data: dict[str, Any]) -> ChatCompletion:
    """The ``ChatCompletion`` of a reply body; fields the type does not know are kept."""
    from openai.types.chat.chat_completion import ChatCompletion

    reply: ChatCompletion = _parse(ChatCompletion, data)
    return reply


def completion_from(data: dict[str, Any]) -> Completion:
    """The ``Completion`` of a reply body."""
    from openai.types.completion import Completion

    reply: Completion = _parse(Completion, data)
    return reply


def _parse(kind: Any, data: dict[str, Any]) -> Any:
    try:
        return kind.model_validate(data)
    except ValueError:  # servers leave out or extend fields; the openai package itself does not insist either
        return kind.construct(**data)


def renumber_choices(choices: list[Any]) -> list[Any]:
    """Give merged choices the indexes 0, 1, 2, ..."""
    for index, choice in enumerate(choices):
        choice.index = index
    return choices


def merge_replies(replies: list[Any]) -> Any:
    """One reply with the choices of all, renumbered, and the usage summed."""
    first, *others = replies
    for other in others:
        first.choices.extend(other.choices)
        if first.usage is not None and other.usage is not None:
            first.usage.completion_tokens += other.usage.completion_tokens
            first.usage.total_tokens += other.usage.completion_tokens
    renumber_choices(first.choices)
    return first


class OpenAIRoutes(APIServer):
    """Chat and completion calls against ``{base_url}/chat/completions`` and ``{base_url}/completions``."""

    def effective_base_url(self) -> str:
        """The endpoint: ``base_url``, or the official API when there is none."""
        return (self.config.base_url or OFFICIAL_API_URL).rstrip("/")

    def root_url(self) -> str:
        """The endpoint without its /v1."""
        return self.effective_base_url().removesuffix("/v1")

    def request_headers(self) -> dict[str, str]:
        """The bearer token, when there is one; OPENAI_API_KEY is only ever sent to the official API."""
        api_key = self.config.api_key
        if not api_key and OFFICIAL_API_HOST in self.effective_base_url():
            api_key = os.environ.get("OPENAI_API_KEY")
            if not api_key:
                raise ConfigError(
                    f"the official API ({OFFICIAL_API_HOST}) needs a key: set api_key or the variable OPENAI_API_KEY, "
                    "or give base_url of your own server"
                )
        return {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Watch the server with GET requests; nothing is ever generated for a health check."""
        await self.watch_health(self.probe)

    async def probe(self) -> bool:
        """Whether the server answers its model list."""
        url = f"{self.effective_base_url()}/models"
        status = await self.http.get_status(url, headers=self.request_headers(), timeout_s=HEALTH_TIMEOUT_S)
        return 0 < status < 500

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Answer ``messages`` with ``n`` choices, also from servers that ignore ``n``."""
        _require(kwargs, "messages")
        return await self._n_choices(super().chat_completion, kwargs)  # type: ignore[no-any-return]

    async def completion(self, **kwargs: Any) -> Completion:
        """Continue ``prompt`` with ``n`` choices, also from servers that ignore ``n``."""
        _require(kwargs, "prompt")
        return await self._n_choices(super().completion, kwargs)  # type: ignore[no-any-return]

    async def _n_choices(self, call: Any, kwargs: dict[str, Any]) -> Any:
        n = kwargs.get("n") or 1
        if n == 1:
            return await call(**kwargs)
        if self.config.n_kwarg_is_ignored:
            return merge_replies(await self._one_by_one(call, kwargs, n))
        reply = await call(**kwargs)
        num_choices = len(reply.choices)
        if num_choices == n:
            return reply
        if num_choices != 1:
            raise ValueError(f"{self.label} returned {num_choices} choices where n={n} was asked")
        logger.warning("%s ignores n; asking n single requests from now on (n_kwarg_is_ignored)", self.label)
        self.config.n_kwarg_is_ignored = True
        return merge_replies([reply, *await self._one_by_one(call, kwargs, n - 1)])

    @staticmethod
    async def _one_by_one(call: Any, kwargs: dict[str, Any], count: int) -> list[Any]:
        single = {key: value for key, value in kwargs.items() if key != "n"}
        return await gather_or_cancel(*(call(**single) for _ in range(count)))

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        reply = chat_completion_from(await self._post("chat/completions", kwargs))
        note_reply_versions(reply, len(reply.choices))
        return reply

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        reply = completion_from(await self._post("completions", kwargs))
        note_reply_versions(reply, len(reply.choices))
        return reply

    async def _post(self, route: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        body, headers, timeout_s = split_request(kwargs)
        reply = await self.http.post_json(
            f"{self.effective_base_url()}/{route}",
            body,
            headers={**self.request_headers(), **headers},
            timeout_s=timeout_s or self.config.timeout,
        )
        return dict(reply)


def _require(kwargs: dict[str, Any], name: str) -> None:
    if kwargs.get(name) is None:
        raise ValueError(f"the call needs {name!r}; got {sorted(kwargs)}")
    if kwargs.get("stream"):
        raise ValueError("stream=True is not supported here: a rollout needs the finished completion; leave it out")


def split_request(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str], float | None]:
    """Body, extra headers and time limit of a call written for the openai client (``extra_body`` and friends)."""
    fields = dict(kwargs)
    extra_body = fields.pop("extra_body", None) or {}
    headers = dict(fields.pop("extra_headers", None) or {})
    fields.pop("extra_query", None)
    timeout_s = fields.pop("timeout", None)
    body = {key: value for key, value in {**fields, **extra_body}.items() if not _is_absent(value)}
    return body, headers, timeout_s if isinstance(timeout_s, int | float) else None


def _is_absent(value: Any) -> bool:
    return value is None or type(value).__name__ in {"NotGiven", "Omit"}
