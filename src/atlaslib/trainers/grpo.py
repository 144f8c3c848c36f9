"""``GRPOTrainer``: group-relative policy optimisation on top of ``transformers.Trainer``.

One optimizer step, as a table of contents (the transformers loop calls the first three):

    get_batch_samples     rollouts (here or from the rollout server) -> samples with advantages -> microbatches
        pipeline.take         rollout() + score() in process, in turns with the update or ahead of it
        service.next_samples  the same from environments, through the rollout server
        update.micro_steps    this process's share, cut into micro-steps and pieces
    training_step         for each piece: log-probs, loss (update.loss), backward
    optimizer step        inside engine.updating(): the sampler sees the new weights at once, the version goes up
    close_step            metrics to JSONL, trackers and the live page

Subclasses change how rollouts are made (``rollout``) or what samples carry (``annotate``); everything below is shared.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import Trainer, TrainerCallback

from atlaslib.algorithms.losses import LossResult
from atlaslib.data.prompts import PromptEncoder, PromptOrder, as_rows
from atlaslib.errors import ConfigError
from atlaslib.generation.protocol import Sampler, SamplingSettings
from atlaslib.rewards.reward_calls import RewardSet
from atlaslib.trainers import batch_sizes, completion_log, evaluation, model_setup, rollouts, run_state
from atlaslib.trainers.choices import default_config, estimator_of, scale_of
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.policy import zero_dropout
from atlaslib.trainers.rollout_pipeline import RolloutPipeline
from atlaslib.trainers.rollouts import Rollout
from atlaslib.trainers.samplers import SamplerHost
from atlaslib.trainers.service_mode import ServiceMode
from atlaslib.trainers.step_hooks import StepHooks, remember_grad_norm
from atlaslib.trainers.step_metrics import MetricsFile, StepMetrics
from atlaslib.trainers.update import MicroStep, PolicyUpdate
from atlaslib.types import Microbatch, TrainingSample
from atroposlib.utils.cli import make_folder

logger = logging.getLogger(__name__)


class GRPOTrainer(Trainer):  # type: ignore[misc]
    """Trains a causal language model with rewards.

    Example::

        trainer = GRPOTrainer(model, reward_funcs=my_reward, args=GRPOConfig("out"), train_dataset=rows, processing_class=tokenizer)
        trainer.train()

    ``GRPOTrainer(config, reward_funcs=...)`` works too: the model is then ``config.model_name_or_path``.
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        *,
        rollout_client: Any = None,
    ) -> None:
        if isinstance(model, GRPOConfig):
            if args is not None:
                raise ConfigError("the config was given twice: as the first argument and as args")
            model, args = None, model
        args = args or default_config(model)
        policy = model_setup.with_adapter(model_setup.load_policy(model, args), peft_config, args)
        if args.disable_dropout:
            zero_dropout(policy)
        tokenizer = model_setup.load_tokenizer(processing_class, policy, args)
        self.reference = model_setup.make_reference(policy, args)
        model_setup.train_last_layers(policy, args.trainable_layers)
        if args.should_save:
            make_folder(args.output_dir, "output_dir")
        super().__init__(
            model=policy,
            args=args,
            data_collator=_identity,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.model_accepts_loss_kwargs = False
        self.config: GRPOConfig = args
        self.rewards = RewardSet(
            reward_funcs,
            weights=args.reward_weights,
            processing_classes=reward_processing_classes,
            model_init_kwargs=args.model_init_kwargs,
            device=self.accelerator.device,
            offload=args.offload_untrained_models,
        )
        self._prepare_parts(rollout_client)

    def _prepare_parts(self, rollout_client: Any) -> None:
        config = self.config
        self.metrics = StepMetrics(verbose=config.activate_debugging_logs)
        self.update = PolicyUpdate(
            accelerator=self.accelerator,
            config=config,
            reference=self.reference,
            pad_id=self.processing_class.pad_token_id,
            metrics=lambda: self.metrics,
        )
        self.prompt_encoder = PromptEncoder(
            self.processing_class, max_length=config.max_prompt_length, template_kwargs=config.chat_template_kwargs
        )
        self.sizes = self.batch_sizes()
        self.prompt_order: PromptOrder | None = None
        self.service: ServiceMode | None = None
        if config.rollout_server_url is not None or rollout_client is not None:
            self.service = ServiceMode(self, client=rollout_client)
        else:
            self._check_in_process()
        self.sampler_host = SamplerHost(self)
        self.pipeline = RolloutPipeline(self)
        self.stop_signal = run_state.StopSignal()
        self.resume_state: dict[str, Any] | None = None
        self.step_samples: list[TrainingSample] = []
        self.step_batch: list[MicroStep] = []
        self._sums: dict[str, float] = {}
        self.add_callback(StepHooks(self))
        path = None if config.metrics_file is None else Path(config.output_dir) / config.metrics_file
        self.metrics_file = MetricsFile(path) if path is not None and self.is_world_process_zero() else None
        remember_grad_norm(self)

    def batch_sizes(self) -> batch_sizes.BatchSizes:
        """How a step is cut into groups; a trainer without groups says so here."""
        return batch_sizes.BatchSizes.of(self.config, num_processes=self.accelerator.num_processes)

    def _check_in_process(self) -> None:
        if self.train_dataset is None:
            raise ConfigError(
                "nothing to train on: give train_dataset (rows with a 'prompt'), or rollout_server_url in the config"
            )
        if len(self.rewards) == 0 and type(self).score is GRPOTrainer.score:
            raise ConfigError("no reward: give reward_funcs (callables, models or names of registered rewards)")
        self._rows = as_rows(self.train_dataset)
        self.prompt_order = PromptOrder(
            num_rows=len(self._rows),
            prompts_per_round=self.sizes.prompts_per_batch,
            seed=self.config.data_seed if self.config.data_seed is not None else self.config.seed,
            artificial_epochs=self.config.artificial_epochs or 1,
        )

    # ------------------------------------------------------------------ what the transformers loop asks for

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[int]:
        """The loop wants something to count micro-steps with; the data itself comes from :meth:`get_batch_samples`."""
        per_update = self.config.gradient_accumulation_steps
        if self.prompt_order is None:
            if self.config.max_steps <= 0:
                raise ConfigError("rollouts from environments have no end: set max_steps")
            updates = self.config.max_steps
        else:
            updates = self.prompt_order.rounds_per_epoch * self.config.num_iterations
        return torch.utils.data.DataLoader(range(updates * per_update), batch_size=1, collate_fn=_identity)  # type: ignore[arg-type]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], None]:
        """The microbatches of one optimizer step; an empty list ends training (the run was asked to stop)."""
        counted = sum(1 for _ in zip(range(num_batches), epoch_iterator, strict=False))
        if counted == 0:
            return [], None
        if self.state.global_step % self.config.num_iterations == 0 or not self.step_samples:
            samples = self._next_samples()
            if samples is None:
                self.control.should_training_stop = self.control.should_save = True
                return [], None
            self.step_samples, self.step_batch = samples, []
        if not self.step_batch:
            self.lay_out_step(counted)
        batch_sizes.log_samples(self.metrics, self.step_samples, self.policy_version)
        self._sums = {}
        return list(self.step_batch), None

    def lay_out_step(self, micro_steps: int) -> None:
        """Microbatches of the present samples."""
        with self.metrics.time("layout"):
            self.step_batch = self.update.micro_steps(self.step_samples, micro_steps, self.model)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one micro-step, piece by piece; returns its share of the step's loss."""
        model.train()
        total = torch.zeros((), device=self.accelerator.device)
        tokens = sum(piece.num_trained_tokens for piece in inputs)
        for number, piece in enumerate(inputs):
            last = number == len(inputs) - 1
            with contextlib.nullcontext() if last else self._accumulating(model):
                with self.sampler_host.exclusive_forward(), self.metrics.time("forward"), self.accelerator.autocast():
                    result = self.update.loss(model, piece, num_micro_step_tokens=tokens)
                with (
                    self.sampler_host.exclusive_backward(),
                    self.metrics.time("backward"),
                    self._recomputing(model, piece),
                ):
                    self._backward(result.loss * self.accelerator.num_processes)
            self._collect(result)
            total = total + result.loss.detach() * self.accelerator.num_processes
        self._sums["loss"] = self._sums.get("loss", 0.0) + float(total) / self.accelerator.num_processes
        return total

    @contextlib.contextmanager
    def _accumulating(self, model: Any) -> Iterator[None]:
        """More pieces of this micro-step follow: processes do not exchange gradients, and DeepSpeed does not step, yet."""
        gradients = self.accelerator.gradient_state
        before = gradients.sync_gradients
        gradients._set_sync_gradients(False)
        try:
            with self.accelerator.no_sync(model):
                yield
        finally:
            gradients._set_sync_gradients(before)

    def _backward(self, loss: torch.Tensor) -> None:
        """DeepSpeed is told not to divide by the micro-steps: the loss is a share of the step already."""
        by_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if by_deepspeed else {}))

    def _recomputing(self, model: Any, piece: Microbatch) -> contextlib.AbstractContextManager[None]:
        """Gradient checkpointing runs the forward pass again during the backward pass."""
        return (
            self.update.attention_of(model, piece) if self.config.gradient_checkpointing else contextlib.nullcontext()
        )

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a list of microbatches (without a backward pass)."""
        tokens = sum(piece.num_trained_tokens for piece in inputs)
        losses = [self.update.loss(model, piece, num_micro_step_tokens=tokens).loss for piece in inputs]
        total = torch.stack(losses).sum()
        return (total, None) if return_outputs else total

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Sample completions of the evaluation prompts and report their rewards (``eval_reward`` and more)."""
        return evaluation.evaluate(self, eval_dataset, metric_key_prefix)

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train; ``resume_from_checkpoint=True`` takes the newest complete checkpoint, ``"auto"`` does so if there is one."""
        checkpoint = run_state.find_checkpoint(resume_from_checkpoint, self.config.output_dir)
        run_state.check_fsdp(checkpoint, enabled=self.is_fsdp_enabled)
        self.resume_state = run_state.load(checkpoint)
        with self.stop_signal.installed(), contextlib.ExitStack() as stack:
            stack.callback(self.sampler_host.close)
            stack.callback(self.pipeline.close)
            if self.service is not None:
                stack.callback(self.service.close)
            result = super().train(resume_from_checkpoint=checkpoint, **kwargs)
        self._check_rewards(min_prompts=1)
        return result

    # ------------------------------------------------------------------ rollouts, in process

    def _next_samples(self) -> list[TrainingSample] | None:
        """All samples of the next batch, the same list on every process; None when the run is asked to stop."""
        if self.service is not None:
            return self.service.next_samples()
        made = self.pipeline.take(self.state.global_step // self.config.num_iterations)
        return self._finish_rollouts(made)

    def round_rows(self, round_index: int, refill: int = 0) -> list[dict[str, Any]]:
        """The rows of the data set a generation round uses."""
        assert self.prompt_order is not None
        return [dict(self._rows[index]) for index in self.prompt_order.rows(round_index, refill)]

    def sync_sampler(self) -> None:
        """Bring the sampler to the present weights before a round of rollouts; all processes call it."""
        self.sampler_host.sync(self.policy_version)

    def rollout(
        self,
        rows: Sequence[dict[str, Any]],
        *,
        group_ids: Sequence[str],
        positions: Sequence[int],
        seed: int,
        num_generations: int,
        settings: SamplingSettings | None = None,
    ) -> list[Rollout]:
        """Completions for ``rows``, ``num_generations`` each, grouped by row. Override to make rollouts another way."""
        return rollouts.sample_rollouts(
            [self.prompt_encoder.encode(row) for row in rows],
            sampler=self.sampler,
            settings=settings or self.sampling_settings(),
            tokenizer=self.processing_class,
            num_generations=num_generations,
            seed=seed,
            group_ids=group_ids,
            positions=positions,
            shuffle=self.config.shuffle_generation_inputs,
        )

    def score(self, made: Sequence[Rollout]) -> None:
        """Rewards into the rollouts; what failed stays without a reward and is counted."""
        if not made:
            return
        inputs = rollouts.reward_inputs(made, all_columns=not self.config.remove_unused_columns)
        table = self.rewards.score(inputs, {"trainer_state": self.state})
        rollouts.apply_rewards(made, table)
        for name, count in table.failures.items():
            self.metrics.count(f"rewards/{name}_failed", count)

    def gather_rollouts(self, local: list[Rollout]) -> list[Rollout]:
        """The rollouts of all processes on each of them; a reward that has failed on everything so far ends the run."""
        self._check_rewards(min_prompts=2)  # one prompt may be the data's fault; the end of the run asks again
        return run_state.gather_lists(self.accelerator, local)

    def _check_rewards(self, *, min_prompts: int) -> None:
        self.rewards.raise_if_broken(
            min_prompts=min_prompts, gather=lambda records: run_state.gather_lists(self.accelerator, records)
        )

    def annotate(self, samples: list[TrainingSample], made: Sequence[Rollout]) -> list[TrainingSample]:
        """A last look at the samples of a batch before they are laid out; for subclasses."""
        return samples

    def evaluation_metrics(self, made: Sequence[Rollout]) -> dict[str, float]:
        """Further numbers about the rollouts of an evaluation; for subclasses."""
        return {}

    def extra_state(self) -> dict[str, Any]:
        """What a subclass wants in the checkpoint, as JSON values."""
        return {}

    def restore_extra_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`extra_state` gave."""

    def _finish_rollouts(self, made: list[Rollout]) -> list[TrainingSample]:
        config = self.config
        rollouts.log_rewards(self.metrics, made)
        if config.overlong_cache_length is not None:
            rollouts.shape_overlong(made, max_length=config.completion_limit, cache_length=config.overlong_cache_length)
        scored = rollouts.to_training_samples(
            made,
            estimator=estimator_of(config),
            scale=scale_of(config),
            mask_truncated=config.mask_truncated_completions,
        )
        self.metrics.put("reward_std", scored.reward_std)
        self.metrics.put("rollout/zero_variance_share", scored.zero_variance_share)
        self.metrics.put("rollout/num_set_aside", float(scored.num_set_aside))
        if self.is_world_process_zero():
            completion_log.store_completions(made, config, self.state.global_step)
            completion_log.log_completions(made, config, self.state.global_step)
        return self.annotate(scored.samples, made)

    def sampling_settings(self, **changes: Any) -> SamplingSettings:
        """How completions are drawn, from the config; ``changes`` replace single values."""
        config = self.config
        values: dict[str, Any] = {
            "max_tokens": config.completion_limit,
            "min_tokens": config.min_completion_length,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "min_p": config.min_p,
            "repetition_penalty": config.repetition_penalty,
            "stop_token_ids": model_setup.stop_token_ids(
                self.accelerator.unwrap_model(self.model), self.processing_class
            ),
            "regex": config.vllm_guided_decoding_regex,
            "logprobs_at_temperature": config.unbias_log_probabilities,
        }
        return SamplingSettings(**{**values, **changes})

    @property
    def sampler(self) -> Sampler:
        """The sampler of the policy; its weights were brought up to date before the round began."""
        return self.sampler_host.sampler

    @property
    def policy_version(self) -> int:
        """Updates the present weights have seen."""
        return int(self.state.global_step)

    def _collect(self, result: LossResult) -> None:
        for name, value in result.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    # ------------------------------------------------------------------ around the step

    def close_step(self) -> None:
        """Metrics of the step that just ended, to the file, the window of the trackers and the live page."""
        batch_sizes.log_sums(self.metrics, run_state.sum_over_processes(self.accelerator, self._sums))
        values = self.metrics.close_step(run_state.sum_over_processes(self.accelerator, self.metrics.take_counts()))
        values["train/learning_rate"] = float(self._get_learning_rate())
        if self.metrics_file is not None:
            self.metrics_file.write(self.state.global_step, values)
        if self.service is not None:
            self.service.report(self.state.global_step, values)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the means of the logging window to a training log line."""
        if "loss" in logs:
            logs = {**logs, **self.metrics.drain_window()}
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """6 operations per parameter and token."""
        tokens = sum(piece.num_input_tokens for piece in inputs)
        return int(6 * tokens * sum(parameter.numel() for parameter in self.model.parameters()))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if str(self.config.include_num_input_tokens_seen) not in {"no", "False"}:
            self.state.num_input_tokens_seen += (
                sum(piece.num_input_tokens for piece in inputs) * self.accelerator.num_processes
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The whole model, also where checkpoints are made of FSDP's shards: transformers writes nothing then."""
        sharded = self.is_fsdp_enabled and "FULL" not in str(self.accelerator.state.fsdp_plugin.state_dict_type)
        if sharded and not _internal_call:
            state = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:
                self._save(output_dir, state_dict=state)
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The rollout position goes in first, ``trainer_state.json`` last: a checkpoint with it is complete."""
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        run_state.save(folder, self)
        super()._save_checkpoint(model, trial)
        if self.service is not None:
            self.service.commit(self.state.global_step)


def _identity(rows: Any) -> Any:
    return rows
