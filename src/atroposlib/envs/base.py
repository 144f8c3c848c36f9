"""``BaseEnv``: the hooks of an environment.

Subclass it, write ``setup``, ``get_next_item``, ``collect_trajectory`` (or ``collect_trajectories``) and
``evaluate``, and call ``MyEnv.cli()``. The hooks live here; what drives them lives elsewhere:

    env_runner.py      the service loop (serve)          submission.py    from a scored result to the rollout server
    process_runner.py  groups to a file (process)        env_checkpoint.py, env_metrics.py, eval_log.py, group_writer.py
    worker_budget.py   how many groups may be in flight  env_cli.py       flags and YAML
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from atroposlib.envs import env_metrics, eval_log, submission
from atroposlib.envs.env_checkpoint import load_env_checkpoint, newest_checkpoint, save_env_checkpoint
from atroposlib.envs.env_config import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.env_runner import EnvRunner
from atroposlib.envs.group_writer import JsonlWriter, unused_path
from atroposlib.envs.groups import group_from_items
from atroposlib.envs.older_interfaces import OlderInterfaces
from atroposlib.envs.process_runner import ProcessRunner
from atroposlib.envs.server_handling.policy_versions import record_policy_versions
from atroposlib.envs.server_handling.server_baseline import (
    APIServer,
    APIServerConfig,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
)
from atroposlib.envs.server_handling.server_manager import ServerManager, ServerManagerConfig
from atroposlib.envs.worker_budget import QueueStatus, derived_batch_size
from atroposlib.errors import ConfigError
from atroposlib.type_definitions import UUID, Item, Message, ScoredDataGroup, ScoredDataItem
from atroposlib.utils.cli import make_folder
from atroposlib.utils.gathering import gather_or_cancel

if TYPE_CHECKING:
    from pydantic import BaseModel

    from atroposlib.api.client import EnvClient
    from atroposlib.envs.env_cli import RunSettings

__all__ = [
    "UUID",
    "APIServer",
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "EvalHandlingEnum",
    "Item",
    "Message",
    "OpenaiConfig",
    "ReasoningConfig",
    "ScoredDataGroup",
    "ScoredDataItem",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
]

logger = logging.getLogger(__name__)
T = TypeVar("T")


class BaseEnv(OlderInterfaces, ABC):
    """One environment: where items come from, how rollouts are made and scored, how it is evaluated.

    Example: ``class Arithmetic(BaseEnv): ...``, then ``Arithmetic.cli()`` and ``python arithmetic.py serve``.
    """

    name: str | None = None
    env_config_cls: type[BaseEnvConfig] = BaseEnvConfig
    server_cls: type[APIServer] = APIServer  # type: ignore[type-abstract]
    cli_namespaces: ClassVar[dict[str, type[BaseModel]]] = {}
    """Further flag and YAML sections of ``serve``: section name -> model of its fields."""

    def __init__(
        self,
        config: BaseEnvConfig,
        server_configs: ServerBaseline | list[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        self.jsonl_writer: Any = None
        self._reset_state()
        self.config: Any = config  # subclasses read fields of their own config class
        self.server = ServerManager(
            server_configs,
            slurm=slurm,
            testing=testing,
            server_class=self.server_cls,
            reasoning_config=ReasoningConfig(
                enabled=config.thinking_mode, effort=config.reasoning_effort, max_tokens=config.max_reasoning_tokens
            ),
        )
        self.tokenizer = self._load_tokenizer()
        self.max_num_workers = self._compute_max_num_workers()
        if config.data_path_to_save_groups is not None:
            path = unused_path(config.data_path_to_save_groups)
            config.data_path_to_save_groups = str(path)
            make_folder(path.parent, "data_path_to_save_groups")
            self.jsonl_writer = JsonlWriter(path)

    def _reset_state(self) -> None:
        """Everything environments read and write on ``self``, at its start value."""
        self.statistics = env_metrics.EnvStatistics()
        self.items_sent_this_step = 0
        self.status_dict: dict[str, Any] | None = None
        self.env_id: int | None = None
        self.curr_step = 0
        self.max_token_len = -1
        self.checkpoint_dir = ""
        self.checkpoint_interval = -1
        self.wandb_prepend: str | None = None
        self.wandb_project: str | None = None
        self.wandb_group: str | None = None
        self.workers: set[asyncio.Task[Any]] = set()
        self.eval_workers: set[asyncio.Task[Any]] = set()
        self.backlog: list[Item] = []
        self.running_items: dict[UUID, dict[str, Any]] = {}
        self.rollouts_for_wandb: list[Any] = []
        self.completion_lengths: list[int] = []
        self.last_completed_item: Item = None
        self.eval_runner: asyncio.Task[Any] | None = None
        self.process_mode = False
        self.n_groups_to_process = 0
        self.group_size_to_process = 0
        self.task_duration: list[float] = []
        self.succeeded_task_duration: list[float] = []
        self.failed_task_duration: list[float] = []
        self.task_successful: list[int] = []
        self.mainloop_timings: list[float] = []
        self.workers_added_list: list[float] = []
        self.last_loop_time: float | None = None
        self._runner: EnvRunner | None = None
        self._rollout_client: EnvClient | None = None

    def _load_tokenizer(self) -> Any:
        from atroposlib.utils.tokenizers.loading import load_tokenizer

        return load_tokenizer(self.config.tokenizer_name)

    def _compute_max_num_workers(self) -> int:
        if self.config.max_num_workers != -1:
            return int(self.config.max_num_workers)
        return int(self.config.max_num_workers_per_node * len(self.server.servers))

    # ------------------------------------------------------------------ what you write

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Any]:
        """The defaults of this environment: its config and its servers (list, one config, or a ``ServerBaseline``)."""
        return cls.default_config(), ServerBaseline()

    async def setup(self) -> None:
        """Load data; called once before anything else. Nothing happens in this one, so an own ``setup`` may call it."""
        if type(self).setup is BaseEnv.setup:
            raise NotImplementedError(f"{type(self).__name__} must define setup()")

    @abstractmethod
    async def get_next_item(self) -> Item:
        """The next item to make a group for; None when there is nothing now."""

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the policy; called whenever the trainer's step passes a multiple of ``steps_per_eval``."""

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | Any, list[Item]]:
        """One scored rollout of ``item``, and items to put into the backlog."""
        raise NotImplementedError(f"{type(self).__name__} must define collect_trajectory() or collect_trajectories()")

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        """A group (or a list of groups, or None) for ``item``, and items for the backlog.

        The default makes ``group_size`` rollouts with ``collect_trajectory`` at the same time; one that fails ends them all.
        """
        results = await gather_or_cancel(*(self._collect_one(item) for _ in range(self.config.group_size)))
        backlog: list[Item] = []
        for rollout, more in results:
            if not isinstance(rollout, dict):
                raise ValueError(
                    f"collect_trajectory returned {type(rollout).__name__} where a ScoredDataItem (a dict) is needed"
                )
            backlog.extend(more or [])
        return group_from_items([rollout for rollout, _ in results]), backlog

    async def _collect_one(self, item: Item) -> tuple[Any, list[Item]]:
        with record_policy_versions() as versions:
            rollout, backlog = await self.collect_trajectory(item)
        if versions and isinstance(rollout, dict):
            rollout.setdefault("policy_versions", sorted(versions))
        return rollout, backlog

    async def postprocess_histories(self, trajectories: Any) -> Any:
        """Last change to a result before it is checked and sent; None drops it."""
        return trajectories

    async def cleanup(self) -> None:
        """Called after every group."""

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Save ``data`` for ``step``; override it to pass the attributes to keep to ``super()``."""
        if data is not None:
            save_env_checkpoint(self.checkpoint_dir, self.wandb_prepend, step, data)

    def load_checkpoint(self) -> None:
        """Set every saved attribute from the newest checkpoint at or before the current step."""
        path = newest_checkpoint(self.checkpoint_dir, self.wandb_prepend, self.curr_step, base_name=self.display_name)
        if path is None:
            logger.info("no checkpoint of %s at or before step %d", self.wandb_prepend, self.curr_step)
            return
        for key, value in load_env_checkpoint(path).items():
            setattr(self, key, value)
        logger.info("continuing from %s", path)

    # ------------------------------------------------------------------ logging

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Item = None) -> None:
        """Keep (text, score) of the first rollouts of a group for the table; nothing is decoded without wandb."""
        if not self.config.use_wandb:
            return
        keep = self.config.num_rollouts_per_group_for_logging
        count = len(scored_data["tokens"]) if keep == -1 else min(keep, len(scored_data["tokens"]))
        self.rollouts_for_wandb.append(
            [(self.tokenizer.decode(scored_data["tokens"][i]), scored_data["scores"][i]) for i in range(count)]
        )
        del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep or None]

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the table of rollouts under ``train/rollouts``."""
        if self.rollouts_for_wandb and self.config.use_wandb:
            import wandb

            table = wandb.Table(columns=["text", "score"])
            for group in self.rollouts_for_wandb:
                for row in group:
                    table.add_data(*row)
            wandb_metrics["train/rollouts"] = table
        return wandb_metrics

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Add the timings of the loop."""
        return env_metrics.perf_stats(self, metrics_dict)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log the metrics of the step; override it to add your own and call ``super()``."""
        metrics: dict[str, Any] = {} if wandb_metrics is None else wandb_metrics
        env_metrics.length_stats(self.completion_lengths, self.max_token_len, metrics)
        metrics = await self.create_rollout_table(metrics)
        metrics = self.perf_stats(metrics)
        self.rollouts_for_wandb, self.completion_lengths = [], []
        if not self.config.use_wandb:
            return
        import wandb

        if self.wandb_prepend is not None:
            metrics = {f"{self.wandb_prepend}_{key}": value for key, value in metrics.items()}
        metrics.update(await env_metrics.server_metrics(self.server.servers))
        wandb.log(metrics, step=self.curr_step)

    async def setup_wandb(self) -> None:
        """Start the wandb run under the trainer's project and group; without wandb one warning, nothing else."""
        if not self.config.use_wandb:
            return
        if not env_metrics.is_wandb_installed():
            self.config.use_wandb = False
            return
        info = await self.runner.wait_for_wandb_info()
        self.wandb_project, self.wandb_group = info["project"], info["group"]
        self.config.use_wandb = env_metrics.start_wandb(
            name=env_metrics.run_name(self.config.wandb_name),
            project=self.wandb_project,
            group=self.wandb_group,
            config=self.config.model_dump(mode="json"),
        )

    # ------------------------------------------------------------------ evaluation

    async def evaluate_log(
        self,
        metrics: dict[str, Any],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: dict[str, Any] | None = None,
        samples: list[Any] | None = None,
        verbose: bool = True,
    ) -> None:
        """Write ``metrics.json`` and ``samples.jsonl`` under ``data_dir_to_save_evals``, show a table; on the live page, too, while serving."""
        eval_log.write_evaluation(
            metrics,
            eval_dir=self.config.data_dir_to_save_evals,
            task_name=task_name or f"{self.display_name}_eval",
            model_name=model_name or eval_log.model_name_of(self.config, self.server.servers),
            start_time=start_time,
            end_time=end_time,
            generation_parameters={"max_new_tokens": self.config.max_token_length, **(generation_parameters or {})},
            samples=samples,
            verbose=verbose,
        )
        if self.env_id is not None:
            numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
            await self.rollout_client.report(f"env:{self.wandb_prepend or self.display_name}", self.curr_step, numbers)

    async def gather_eval(self, tasks: Iterable[Awaitable[T]]) -> list[T]:
        """``asyncio.gather`` with at most ``max_eval_workers`` running at once; results in order.

        Example: ``scores = await self.gather_eval(self.score(item) for item in self.test)``
        """
        return await eval_log.gather_bounded(
            tasks, max_at_once=self.config.max_eval_workers, title=f"{self.display_name} evaluation"
        )

    # ------------------------------------------------------------------ rollout server

    @property
    def display_name(self) -> str:
        """``wandb_name``, else ``name``, else the class's name."""
        return str(self.config.wandb_name or self.name or type(self).__name__)

    @property
    def derived_batch_size(self) -> int:
        """The part of a batch that this environment may fill."""
        status = None if self.status_dict is None else QueueStatus.from_reply(self.status_dict)
        return derived_batch_size(self.config.batch_size, status, self.config.min_batch_allocation)

    @property
    def rollout_client(self) -> EnvClient:
        """The client of the rollout server, made at the first use."""
        if self._rollout_client is None:
            from atroposlib.api.client import EnvClient

            self._rollout_client = EnvClient(self.config.rollout_server_url)
        return self._rollout_client

    @property
    def runner(self) -> EnvRunner:
        """The loop that drives this environment."""
        if self._runner is None:
            self._runner = EnvRunner(self)
        return self._runner

    async def _register_env(self) -> dict[str, Any]:
        """One try to register."""
        reply = await self.rollout_client.register(
            name=self.display_name,
            max_token_length=self.config.max_token_length,
            weight=self.config.inference_weight,
            group_size=self.config.group_size,
            min_batch_allocation=self.config.min_batch_allocation,
        )
        return dict(reply)

    async def register_env(self) -> None:
        """Register at the rollout server, waiting for it and for the trainer."""
        await self.runner.register()

    async def get_server_info(self) -> None:
        """Take over the trainer's batch size and sequence length."""
        info = await self.rollout_client.info()
        if info.get("batch_size", -1) != -1:
            self.config.batch_size = info["batch_size"]
        if info.get("max_token_len", -1) != -1:
            self.max_token_len = info["max_token_len"]
        if self.config.batch_size != -1 and self.config.group_size > self.config.batch_size:
            raise ConfigError(
                f"group_size ({self.config.group_size}) is larger than the trainer's batch_size ({self.config.batch_size}); "
                "make the batch larger or the groups smaller"
            )

    async def get_status(self) -> None:
        """Ask the rollout server for step and queue; adapts the worker limit and the share of the inference slots."""
        self.status_dict = await self.rollout_client.status()
        self.max_num_workers = self._compute_max_num_workers()
        if self.config.inference_weight >= 0:
            updated: Any = self.server.update_weight(self.status_dict.get("env_weight", 1.0))
            if inspect.isawaitable(updated):
                await updated

    async def env_step_checks(self) -> None:
        """Evaluation, checkpoint and logging when the trainer's step moved on."""
        await self.runner.check_step()

    async def add_train_workers(self) -> None:
        """Start groups while the budget allows."""
        await self.runner.add_workers()

    async def handle_env(self, item_uuid: UUID) -> Any:
        """One group: collect, postprocess, send, clean up; returns what was collected."""
        return await self.runner.workers.run_item(item_uuid)

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Check a group or a list of groups, write it, send it."""
        await submission.accept_and_send(
            self,
            scored_data,
            item,
            do_send_to_api=do_send_to_api,
            abort_on_any_max_length_exceeded=abort_on_any_max_length_exceeded,
        )

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        """Hand a group or a list of groups to the rollout server; waits while it is away."""
        await submission.hand_over(self, scored_data)

    def _post_json_with_compression(self, session: Any, url: str, payload: Any, *, minimum_size: int = 1024) -> Any:
        """``session.post`` of a JSON body, gzipped when that makes it smaller; returns the un-awaited request."""
        body, headers = submission.packed_json(payload, minimum_size)
        return session.post(url, data=body, headers=headers)

    # ------------------------------------------------------------------ the three commands

    async def env_manager(self) -> None:
        """Serve: make groups for the trainer until it has what it needs."""
        await self.runner.serve()

    async def process_manager(self) -> None:
        """Process: make ``n_groups_to_process`` groups and write them to a file."""
        await ProcessRunner(self).run()

    async def _run_evaluate(self) -> Any:
        """Evaluate once; with wandb the metrics are logged there, too."""
        await self.setup()
        self.start_own_wandb_run()
        try:
            result = await self.evaluate()
            if self.config.use_wandb:
                await self.wandb_log({})
            return result
        finally:
            await self.close_servers()

    def start_own_wandb_run(self) -> None:
        """A wandb run without a trainer (process, evaluate), named after the environment."""
        if self.config.use_wandb:
            self.config.use_wandb = env_metrics.start_wandb(
                name=env_metrics.run_name(self.name or self.display_name), config=self.config.model_dump(mode="json")
            )

    async def close_servers(self) -> None:
        """Close the connections to the inference servers."""
        close = getattr(self.server, "aclose", None)
        if close is not None:
            await close()

    @classmethod
    def cli(cls) -> None:
        """The command line ``serve | process | evaluate`` of this environment."""
        from atroposlib.envs.env_cli import main

        code = main(cls, sys.argv[1:])
        if code:
            sys.exit(code)

    @classmethod
    def from_cli(cls, settings: RunSettings) -> BaseEnv:
        """Construct the environment from resolved settings; override it to use sections of your own."""
        from atroposlib.envs.env_cli import constructor_keywords

        return cls(**constructor_keywords(cls, settings))

    @classmethod
    def get_cli_serve_config_cls(cls, default_env_config: BaseEnvConfig, default_server_configs: Any) -> type:
        """A model of all flags of ``serve``, whose ``run()`` executes it with the process's arguments."""
        from atroposlib.envs.env_cli import command_model

        return command_model(cls, "serve", default_env_config, default_server_configs)

    @classmethod
    def get_cli_process_config_cls(cls, default_env_config: BaseEnvConfig, default_server_configs: Any) -> type:
        """A model of all flags of ``process``, whose ``run()`` executes it with the process's arguments."""
        from atroposlib.envs.env_cli import command_model

        return command_model(cls, "process", default_env_config, default_server_configs)

    @classmethod
    def get_cli_evaluate_config_cls(cls, default_env_config: BaseEnvConfig, default_server_configs: Any) -> type:
        """A model of all flags of ``evaluate``, whose ``run()`` executes it with the process's arguments."""
        from atroposlib.envs.env_cli import command_model

        return command_model(cls, "evaluate", default_env_config, default_server_configs)
