"""``EnvRunner``: the loop that drives one environment in service mode.

    setup -> setup_wandb -> register_env -> get_server_info -> loop:
        get_status        what the trainer and the queue are doing
        env_step_checks   evaluation, checkpoint, logging at step boundaries
        stop?             the trainer took its last batch
        add_train_workers start groups while the budget (worker_budget.py) allows
        overdue           groups older than worker_timeout are cancelled, their item is tried once more

Every step is called through the environment, so an override wins. State lives on the environment (its public
attributes); this object owns only what the loop needs to run. A finished group wakes the loop at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atroposlib.envs.env_config import EvalHandlingEnum
from atroposlib.envs.env_metrics import Stopwatch
from atroposlib.envs.group_workers import GroupWorkers, append_bounded
from atroposlib.envs.submission import unreachable_errors
from atroposlib.envs.worker_budget import (
    BudgetLimits,
    QueueStatus,
    allowed_workers,
    crosses_boundary,
    eval_cap,
    is_enough,
)
from atroposlib.errors import AtroposError, ConfigError, RolloutRejectedError

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

logger = logging.getLogger(__name__)

STATUS_INTERVAL_S = 0.2
"""How often the rollout server is asked for its state."""
REPORT_INTERVAL_S = 5.0
"""How often metrics go to the rollout server."""
STATUS_TIMEOUT_S = 10.0
TRAINER_POLL_S = 1.0
"""How often registration is tried while no trainer has started."""
FIRST_RETRY_S = 0.5
SAY_EVERY_S = 30.0
"""How often a wait for somebody else is mentioned."""
FINISH_TIMEOUT_S = 20.0
"""How long groups already on their way to the rollout server may take when the loop ends."""
MAX_BACKOFF_S = 15.0


class EnvRunner:
    """Drives one environment against its rollout server.

    Example: ``await EnvRunner(env).serve()``
    """

    def __init__(self, env: BaseEnv) -> None:
        self.env = env
        self.wake = asyncio.Event()
        self.workers = GroupWorkers(env, self.wake)
        self._status_at = 0.0
        self._sent_at_status = 0
        self._unreachable_since: float | None = None
        self._registered_before = False
        self._said_at = -SAY_EVERY_S
        self._eval_is_due = False

    # ------------------------------------------------------------------ the loop

    async def serve(self) -> None:
        """Run until the trainer has what it needs."""
        env = self.env
        await env.setup()
        try:
            await env.setup_wandb()
            await env.register_env()
            await env.get_server_info()
        except BaseException:  # refused, or told to stop while waiting: connections are closed, the error goes on
            await env.rollout_client.aclose()
            await env.close_servers()
            raise
        reporter = asyncio.create_task(self._report_forever(), name="report metrics")
        try:
            while await self._turn():
                await self._pause()
            await self._finish_evaluation()
        finally:
            reporter.cancel()
            await self._finish()

    async def _turn(self) -> bool:
        """One round of the loop; False when the work is done."""
        env = self.env
        watch = Stopwatch()
        await self._refresh_status()
        await env.env_step_checks()
        if self.status().current_step >= env.config.total_steps:
            return False
        if self._may_start():
            await env.add_train_workers()
        self.workers.cancel_overdue()
        append_bounded(env.mainloop_timings, watch.seconds)
        env.last_loop_time = time.time()
        return True

    async def _pause(self) -> None:
        """Sleep until a group ends, at most until the next look at the rollout server."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STATUS_INTERVAL_S):
                await self.wake.wait()
        self.wake.clear()

    async def _finish_evaluation(self) -> None:
        """The evaluation of the last step is completed and logged before the environment leaves."""
        self.workers.cancel_running()
        if self._eval_is_due and not self.is_evaluating():
            self.start_evaluation()
        if self.env.eval_runner is not None and not self.env.eval_runner.done():
            await asyncio.wait([self.env.eval_runner])
            await self._log()

    async def _finish(self) -> None:
        """Stop rollouts that are no longer needed; groups on their way to the rollout server still arrive."""
        env = self.env
        self.workers.cancel_running()
        sending = {worker for worker in env.workers if not worker.done()}
        if sending:
            _, late = await asyncio.wait(sending, timeout=FINISH_TIMEOUT_S)
            for worker in late:
                worker.cancel()
        if env.eval_runner is not None and not env.eval_runner.done():
            env.eval_runner.cancel()
        if env.jsonl_writer is not None:
            env.jsonl_writer.close()
        with suppress(*unreachable_errors(), AtroposError, asyncio.CancelledError):
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                await self._say_goodbye()
        await env.rollout_client.aclose()
        await env.close_servers()

    async def _say_goodbye(self) -> None:
        await self.report()
        await self.env.rollout_client.disconnect()

    def _may_start(self) -> bool:
        """True when there is room for more groups and the trainer still needs some."""
        config, status = self.env.config, self.status()
        if is_enough(
            status, group_size=config.group_size, batch_size=config.batch_size, total_steps=config.total_steps
        ):
            return False
        return self.workers.may_start() and allowed_workers(self.limits(), status) > 0

    # ------------------------------------------------------------------ rollout server

    async def register(self) -> None:
        """Register, waiting for the rollout server and for the trainer as long as it takes."""
        env = self.env
        wait_s = FIRST_RETRY_S
        while True:
            try:
                reply = await env._register_env()
            except unreachable_errors() as error:
                self._note_unreachable(error)
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, MAX_BACKOFF_S)
                continue
            if reply.get("status") == "success":
                break
            self._say_waiting(f"the trainer to start ({reply.get('status')})")
            await asyncio.sleep(TRAINER_POLL_S)
        self._note_reachable()
        self._adopt_registration(reply)

    def _adopt_registration(self, reply: dict[str, Any]) -> None:
        env = self.env
        env.env_id = reply["env_id"]
        env.checkpoint_dir = reply.get("checkpoint_dir") or env.checkpoint_dir
        env.checkpoint_interval = reply.get("checkpoint_interval", env.checkpoint_interval)
        if self._registered_before:  # same process, restarted rollout server: name, step and state go on
            return
        self._registered_before = True
        env.wandb_prepend = reply.get("wandb_name") or env.display_name
        env.curr_step = int(reply.get("starting_step", 0))
        if env.config.total_steps == -1:
            env.config.total_steps = int(reply.get("num_steps", -1))
            if env.config.total_steps == -1:
                raise ConfigError("total_steps is -1 and the trainer announces no number of steps; set total_steps")
        logger.info("registered as %s (id %s) at step %s", env.wandb_prepend, env.env_id, env.curr_step)
        if env.curr_step > 0:
            env.load_checkpoint()

    async def wait_for_wandb_info(self) -> dict[str, Any]:
        """The trainer's wandb project and group, as soon as a trainer has registered."""
        while True:
            try:
                info = await self.env.rollout_client.wandb_info()
            except unreachable_errors() as error:
                self._note_unreachable(error)
            else:
                self._note_reachable()
                if info.get("project") is not None:
                    return dict(info)
                self._say_waiting("a trainer to register")
            await asyncio.sleep(TRAINER_POLL_S)

    async def _refresh_status(self) -> None:
        """Ask for the state when the last answer is old; an absent server is waited for, a new one joined."""
        env = self.env
        if time.monotonic() - self._status_at < STATUS_INTERVAL_S and env.status_dict is not None:
            return
        sent = env.statistics.num_groups_sent
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                await env.get_status()
            if env.config.batch_size == -1:
                await env.get_server_info()
        except RolloutRejectedError as error:
            logger.warning("the rollout server does not know this environment any more (%s); registering again", error)
            await env.register_env()
            await env.get_server_info()
        except unreachable_errors() as error:
            self._note_unreachable(error)
            if env.status_dict is None:
                env.status_dict = {"current_step": env.curr_step, "queue_size": 0}
        else:
            self._note_reachable()
            self._sent_at_status = sent
        self._status_at = time.monotonic()

    def _note_unreachable(self, error: BaseException) -> None:
        if self._unreachable_since is None:
            self._unreachable_since = time.monotonic()
            logger.warning(
                "the rollout server at %s does not answer (%s: %s); trying again, finished groups are kept (run-api starts a server)",
                self.env.config.rollout_server_url,
                type(error).__name__,
                error,
            )

    def _say_waiting(self, for_what: str) -> None:
        if time.monotonic() - self._said_at > SAY_EVERY_S:
            self._said_at = time.monotonic()
            logger.info("waiting at %s for %s", self.env.config.rollout_server_url, for_what)

    def _note_reachable(self) -> None:
        if self._unreachable_since is not None:
            logger.info("the rollout server is back after %.1f s", time.monotonic() - self._unreachable_since)
            self._unreachable_since = None

    def status(self) -> QueueStatus:
        """The last known state plus what was sent since."""
        env = self.env
        known = QueueStatus.from_reply(env.status_dict or {})
        sent = env.statistics.num_groups_sent - self._sent_at_status
        return replace(known, queue_size=known.queue_size + sent, self_queue_size=known.self_queue_size + sent)

    def limits(self) -> BudgetLimits:
        """The settings that bound the work, as they are now."""
        config = self.env.config
        return BudgetLimits(
            group_size=config.group_size,
            batch_size=config.batch_size,
            max_num_workers=self.env.max_num_workers,
            max_batches_offpolicy=config.max_batches_offpolicy,
            min_batch_allocation=config.min_batch_allocation,
            ignores_share=config.inference_weight < 0,
        )

    async def report(self) -> None:
        """Send the environment's metrics for the live page."""
        env = self.env
        metrics = env.statistics.report(num_workers=len(env.workers), num_backlog=len(env.backlog))
        await env.rollout_client.report(f"env:{env.wandb_prepend or env.display_name}", env.curr_step, metrics)

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            try:
                await self.env.rollout_client.heartbeat()
                await self.report()
            except Exception as error:  # a number on a page is never worth more than the run
                logger.debug("metrics not reported: %s", error)

    # ------------------------------------------------------------------ step boundaries

    async def check_step(self) -> None:
        """Evaluate, save and log when the trainer's step moved on."""
        env = self.env
        new_step = self.status().current_step
        if self._eval_is_due and not self.is_evaluating():
            self.start_evaluation()
        if new_step == env.curr_step:
            return
        if crosses_boundary(env.curr_step, new_step, env.config.steps_per_eval):
            if self.is_evaluating():
                logger.warning(
                    "evaluation due at step %d while the last one still runs; it starts when that ends", new_step
                )
                self._eval_is_due = True
            else:
                self.start_evaluation()
        if crosses_boundary(env.curr_step, new_step, env.checkpoint_interval):
            self._save(new_step // env.checkpoint_interval * env.checkpoint_interval)
        env.curr_step = new_step
        if env.items_sent_this_step >= env.config.min_items_sent_before_logging:
            env.items_sent_this_step = 0
            await self._log()

    def _save(self, step: int) -> None:
        try:
            self.env.save_checkpoint(step)
        except Exception as error:  # user code: its failure is shown, the loop goes on
            self.env.statistics.failures.record("save_checkpoint", error)

    async def _log(self) -> None:
        try:
            await self.env.wandb_log({})
        except Exception as error:  # user code or wandb: its failure is shown, the loop goes on
            self.env.statistics.failures.record("wandb_log", error)

    def is_evaluating(self) -> bool:
        """True while an evaluation runs."""
        return self.env.eval_runner is not None and not self.env.eval_runner.done()

    def start_evaluation(self) -> None:
        """Start ``evaluate()``; under STOP_TRAIN the running rollouts make room."""
        self._eval_is_due = False
        self.env.eval_runner = asyncio.create_task(self._evaluate(), name="evaluate")
        if self.env.config.eval_handling == EvalHandlingEnum.STOP_TRAIN:
            self.workers.cancel_running()

    async def _evaluate(self) -> Any:
        try:
            return await self.env.evaluate()
        except Exception as error:  # user code: counted and shown, training goes on
            self.env.statistics.failures.record("evaluate", error)
            return None
        finally:
            self.wake.set()

    # ------------------------------------------------------------------ workers

    async def add_workers(self) -> None:
        """Start groups while the budget allows; during an evaluation as ``eval_handling`` says."""
        env = self.env
        cap = None
        if self.is_evaluating():
            if env.config.eval_handling == EvalHandlingEnum.STOP_TRAIN:
                return
            if env.config.eval_handling == EvalHandlingEnum.LIMIT_TRAIN:
                cap = eval_cap(env.max_num_workers, env.config.eval_limit_ratio)
        await self.workers.fill(allowed_workers(self.limits(), self.status(), cap=cap))
