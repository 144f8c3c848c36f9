"""``TeacherDistillationEnv``: every group also carries the teacher's top-k log-probs of the student's own tokens.

    student rollouts -> group -> _attach_teacher_distillation -> distill_token_ids, distill_logprobs [sequence][position][k]

The teacher scores exactly the token ids the student produced, so both must share one vocabulary. Mix this class into an
existing environment (``class MyDistill(MyEnv, TeacherDistillationEnv)``) or derive from it alone.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.constants import NAMESPACE_SEP, OPENAI_NAMESPACE
from atroposlib.envs.env_config import BaseEnvConfig
from atroposlib.envs.server_handling.openai_server import resolve_openai_configs
from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ServerBaseline
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from atroposlib.envs.env_cli import RunSettings

logger = logging.getLogger(__name__)

TeacherConfigs = Any
"""A list of server configs, one ``APIServerConfig``, a ``ServerBaseline``, or None."""
TopK = tuple[list[list[int]], list[list[float]]]

_handed_over: ContextVar[TeacherConfigs] = ContextVar("teacher_server_configs", default=None)
"""Teacher servers for constructors that have no argument for them."""


class TeacherDistillationConfig(BaseEnvConfig):
    """Settings of an environment with a teacher."""

    teacher_enabled: bool = Field(default=False, description="ask the teacher for its log-probs of every sequence")
    teacher_top_k: int = Field(
        default=0,
        ge=-1,
        description="how many of the teacher's most likely tokens to keep per position; 0: the server's default, -1: none",
    )


class TeacherDistillationEnv(BaseEnv):
    """An environment that asks a teacher what it would have said at every position.

    The teacher's servers come from the constructor, from ``teacher_config_init``, or on the command line from
    ``--teacher.*`` flags and the ``teacher:`` section of the YAML file.
    """

    env_config_cls: type[BaseEnvConfig] = TeacherDistillationConfig
    teacher_namespace: ClassVar[str] = "teacher"
    cli_namespaces: ClassVar[dict[str, type[BaseModel]]] = {"teacher": APIServerConfig}

    def __init__(
        self,
        config: Any,
        server_configs: Any,
        teacher_server_configs: TeacherConfigs = None,
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        if isinstance(teacher_server_configs, bool):
            # An environment mixed in before this class calls super().__init__(config, server_configs, slurm, testing).
            teacher_server_configs, slurm, testing = None, teacher_server_configs, slurm
        super().__init__(config, server_configs, slurm=slurm, testing=testing)
        self.teacher_server: Any = None
        self.num_teacher_failures = 0
        if getattr(config, "teacher_enabled", False):
            self._connect_teacher(_first_given(teacher_server_configs, _handed_over.get(), self.teacher_config_init()))

    @classmethod
    def teacher_config_init(cls) -> TeacherConfigs:
        """The teacher's servers when nothing else names them; override it."""
        return None

    def _connect_teacher(self, configs: TeacherConfigs) -> None:
        if not configs:
            raise ConfigError(
                "teacher_enabled=True requires a teacher, but no teacher server configuration was provided; pass "
                "teacher_server_configs, define teacher_config_init, or use --teacher.base_url and --teacher.model_name"
            )
        if isinstance(configs, APIServerConfig):
            configs = [configs]
        first: ServerBaseline = configs[0] if isinstance(configs, list | tuple) else configs
        self.teacher_server = ServerManager(configs, slurm=False, testing=False)
        named = first.tokenizer_name not in ("", "none")
        self._validate_teacher_tokenizer_compatibility(first.tokenizer_name if named else first.model_name)

    def _validate_teacher_tokenizer_compatibility(self, teacher_tokenizer_name: str) -> None:
        """Refuse a teacher whose token ids mean something else."""
        if getattr(self.tokenizer, "name_or_path", None) == teacher_tokenizer_name:
            return
        refusal = f"Cross-tokenizer distillation is not supported: the teacher's tokenizer {teacher_tokenizer_name!r}"
        try:
            from transformers import AutoTokenizer

            vocabulary = AutoTokenizer.from_pretrained(teacher_tokenizer_name).get_vocab()
        except Exception as error:  # hub, disk and tokenizer code raise what they like: it cannot be checked
            raise ConfigError(f"{refusal} could not be loaded for comparison ({error})") from error
        if vocabulary != self.tokenizer.get_vocab():
            raise ConfigError(
                f"{refusal} has another vocabulary than {getattr(self.tokenizer, 'name_or_path', 'the student')!r}"
            )

    # ------------------------------------------------------------------ groups

    async def _fetch_teacher_for_sequence(self, token_ids: list[int], top_k: int) -> TopK:
        """The teacher's top-k ids and log-probs at every position of one sequence."""
        reply = await self.teacher_server.get_logprobs(input_ids=token_ids, top_k=top_k, max_tokens=1, split="train")
        return reply["prompt_topk_token_ids"], reply["prompt_topk_logprobs"]

    async def _attach_teacher_distillation(self, group: Any) -> Any:
        """Add both distillation fields to ``group``; both None when the teacher is skipped or fails for any sequence."""
        if not self.config.teacher_enabled or self.teacher_server is None or not isinstance(group, dict):
            return group
        overrides = group.get("group_overrides") or {}
        top_k = int(overrides.get("teacher_top_k", self.config.teacher_top_k))
        sequences = group.get("tokens") or []
        group["distill_token_ids"] = group["distill_logprobs"] = None
        if not sequences or overrides.get("skip_teacher_top_k") or top_k <= -1:
            return group
        replies = await asyncio.gather(
            *(self._fetch_teacher_for_sequence(ids, top_k) for ids in sequences), return_exceptions=True
        )
        problem = next(
            (text for ids, reply in zip(sequences, replies, strict=True) if (text := _what_is_wrong(ids, reply))), None
        )
        if problem is not None:
            self.num_teacher_failures = getattr(self, "num_teacher_failures", 0) + 1
            logger.warning("group without distillation data (%d so far): %s", self.num_teacher_failures, problem)
            return group
        group["distill_token_ids"] = [reply[0] for reply in replies]  # type: ignore[index]  # exceptions were handled above
        group["distill_logprobs"] = [reply[1] for reply in replies]  # type: ignore[index]
        return group

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Any = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Ask the teacher, then check, write and send as every environment does."""
        if isinstance(scored_data, list):
            scored_data = list(await asyncio.gather(*map(self._attach_teacher_distillation, scored_data)))
        elif scored_data is not None:
            scored_data = await self._attach_teacher_distillation(scored_data)
        await super().handle_send_to_api(
            scored_data,
            item,
            do_send_to_api=do_send_to_api,
            abort_on_any_max_length_exceeded=abort_on_any_max_length_exceeded,
        )

    async def close_servers(self) -> None:
        """Close the connections to the inference servers and to the teacher's."""
        await super().close_servers()
        if self.teacher_server is not None:
            await self.teacher_server.aclose()

    # ------------------------------------------------------------------ command line

    @classmethod
    def _resolve_teacher_server_configs(
        cls,
        default_teacher_server_configs: TeacherConfigs,
        yaml_config: Mapping[str, Any],
        cli_passed_flags: Mapping[str, Any],
    ) -> TeacherConfigs:
        """The teacher's servers from flags, YAML and ``teacher_config_init``; None when no source names any."""
        prefix = cls.teacher_namespace + NAMESPACE_SEP
        from_yaml = yaml_config.get(cls.teacher_namespace)
        flags = {
            name.removeprefix(prefix): value for name, value in cli_passed_flags.items() if name.startswith(prefix)
        }
        if default_teacher_server_configs is None and not from_yaml and not flags:
            return None
        default = (
            [default_teacher_server_configs]
            if isinstance(default_teacher_server_configs, APIServerConfig)
            else default_teacher_server_configs
        )
        base = default[0].model_dump() if isinstance(default, list) and len(default) == 1 else {}
        single = (
            from_yaml
            if isinstance(from_yaml, Mapping)
            else from_yaml[0]
            if isinstance(from_yaml, list) and len(from_yaml) == 1
            else {}
        )
        return resolve_openai_configs(
            default_server_configs=default if default is not None else [APIServerConfig()],
            openai_config_dict={**base, **single, **flags},
            yaml_config={OPENAI_NAMESPACE: from_yaml} if from_yaml else {},
            cli_passed_flags={f"{OPENAI_NAMESPACE}{NAMESPACE_SEP}{name}": value for name, value in flags.items()},
            logger=logger,
        )

    @classmethod
    def from_cli(cls, settings: RunSettings) -> BaseEnv:
        """Construct with the teacher of the command line, also when the subclass's constructor knows no teacher."""
        from atroposlib.envs.env_cli import constructor_keywords

        teacher = cls._resolve_teacher_server_configs(cls.teacher_config_init(), settings.yaml_config, settings.flags)
        keywords = constructor_keywords(cls, settings)
        if "teacher_server_configs" in inspect.signature(cls.__init__).parameters:
            keywords["teacher_server_configs"] = teacher
        with _hand_over(teacher):
            return cls(**keywords)


@contextmanager
def _hand_over(configs: TeacherConfigs) -> Iterator[None]:
    token = _handed_over.set(configs)
    try:
        yield
    finally:
        _handed_over.reset(token)


def _first_given(*candidates: TeacherConfigs) -> TeacherConfigs:
    return next((candidate for candidate in candidates if candidate), None)


def _what_is_wrong(token_ids: list[int], reply: TopK | BaseException) -> str | None:
    if isinstance(reply, asyncio.CancelledError):
        raise reply
    if isinstance(reply, BaseException):
        return f"the teacher failed ({type(reply).__name__}: {reply})"
    ids, logprobs = reply
    if not len(ids) == len(logprobs) == len(token_ids):
        return f"the teacher returned {len(ids)} positions of ids and {len(logprobs)} of log-probs for {len(token_ids)} tokens"
    return None
