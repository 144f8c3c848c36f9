"""``GRPOTrainer``: group-relative policy optimisation on top of ``transformers.Trainer``.

One optimizer step, as a table of contents (the transformers loop calls the first three):

    get_batch_samples     rollouts (here or from the rollout server) -> samples with advantages -> microbatches
        _next_samples         rollout() + score() in process   |   RolloutSource in service mode
        _share_of_process     this process's part, cut into micro-steps and pieces
    training_step         for each piece: log-probs, loss, backward
        _loss                 policy and reference log-probs -> algorithms.losses.policy_loss
    optimizer step        inside engine.updating(): the sampler sees the new weights at once, the version goes up
    _close_step           metrics to JSONL, trackers and the live page

Subclasses change how rollouts are made (``rollout``) or what samples carry (``annotate``); everything below is shared.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from atlaslib.algorithms.losses import LossOptions, LossResult, TokenStreams, policy_loss
from atlaslib.data.packing import build_microbatch, split_evenly
from atlaslib.data.prompts import PromptEncoder, PromptOrder, as_rows, derive_seed
from atlaslib.errors import ConfigError
from atlaslib.generation.protocol import Sampler, SamplingSettings
from atlaslib.rewards.reward_calls import RewardSet, on_device
from atlaslib.trainers import batch_sizes, evaluation, model_setup, rollouts, run_state
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.policy import PolicyForward, adapter_disabled, zero_dropout
from atlaslib.trainers.rollouts import Rollout
from atlaslib.trainers.samplers import SamplerHost
from atlaslib.trainers.service_mode import ServiceMode
from atlaslib.trainers.step_metrics import MetricsFile, StepMetrics
from atlaslib.types import Microbatch, StepTotals, TrainingSample

logger = logging.getLogger(__name__)


class GRPOTrainer(Trainer):
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
        if self.reference is not None and not config.offload_untrained_models:
            self.reference.to(self.accelerator.device)
        self.metrics = StepMetrics()
        self.forward_logprobs = PolicyForward(
            unwrap=self.accelerator.unwrap_model, chunk_size=config.logprob_chunk_size, at_temperature=config.unbias_log_probabilities
        )
        self.loss_options = loss_options(config)
        self.prompt_encoder = PromptEncoder(self.processing_class, max_length=config.max_prompt_length, template_kwargs=config.chat_template_kwargs)
        self.sizes = batch_sizes.BatchSizes.of(config, num_processes=self.accelerator.num_processes)
        self.prompt_order: PromptOrder | None = None
        self.service: ServiceMode | None = None
        if config.rollout_server_url is not None or rollout_client is not None:
            self.service = ServiceMode(self, client=rollout_client)
        else:
            self._check_in_process()
        self.sampler_host = SamplerHost(self)
        self._stop = run_state.StopSignal()
        self._step_batch: list[list[Microbatch]] = []
        self._step_samples: list[TrainingSample] = []
        self._totals = StepTotals(num_sequences=1, num_tokens=1, num_microbatches=1)
        self._sums: dict[str, float] = {}
        self._resume_state: dict[str, Any] | None = None
        self.add_callback(_StepHooks(self))
        path = None if config.metrics_file is None else Path(config.output_dir) / config.metrics_file
        self._metrics_file = MetricsFile(path) if path is not None and self.is_world_process_zero() else None
        _remember_grad_norm(self)

    def _check_in_process(self) -> None:
        if self.train_dataset is None:
            raise ConfigError("nothing to train on: give train_dataset (rows with a 'prompt'), or rollout_server_url in the config")
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
        if self.state.global_step % self.config.num_iterations == 0 or not self._step_samples:
            samples = self._next_samples()
            if samples is None:
                self.control.should_training_stop = self.control.should_save = True
                return [], None
            self._step_samples = samples
            self._step_batch = []
        if not self._step_batch:
            with self.metrics.time("layout"):
                self._step_batch = self._share_of_process(self._step_samples, counted)
        self._sums = {}
        return list(self._step_batch), None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one micro-step, piece by piece; returns its share of the step's loss."""
        model.train()
        total = torch.zeros((), device=self.accelerator.device)
        for number, piece in enumerate(inputs):
            last = number == len(inputs) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                with self.sampler_host.exclusive_forward(), self.metrics.time("forward"), self.compute_loss_context_manager(), self.accelerator.autocast():
                    result = self._loss(model, piece)
                with self.sampler_host.exclusive_backward(), self.metrics.time("backward"):
                    self.accelerator.backward(result.loss * self.accelerator.num_processes)
            self._collect(result)
            total = total + result.loss.detach() * self.accelerator.num_processes
        return total

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """The loss of a list of microbatches (without a backward pass)."""
        losses = [self._loss(model, piece).loss for piece in inputs]
        total = torch.stack(losses).sum()
        return (total, None) if return_outputs else total

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Sample completions of the evaluation prompts and report their rewards (``eval_reward`` and more)."""
        return evaluation.evaluate(self, eval_dataset, metric_key_prefix)

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train; ``resume_from_checkpoint=True`` takes the newest complete checkpoint, ``"auto"`` does so if there is one."""
        checkpoint = run_state.find_checkpoint(resume_from_checkpoint, self.config.output_dir)
        self._resume_state = run_state.load(checkpoint)
        with self._stop.installed(), contextlib.ExitStack() as stack:
            stack.callback(self.sampler_host.close)
            if self.service is not None:
                stack.callback(self.service.close)
            return super().train(resume_from_checkpoint=checkpoint, **kwargs)

    # ------------------------------------------------------------------ rollouts, in process

    def _next_samples(self) -> list[TrainingSample] | None:
        """All samples of the next batch, the same list on every process; None when the run is asked to stop."""
        if self.service is not None:
            return self.service.next_samples()
        return self._sample_batch(self.state.global_step // self.config.num_iterations)

    def _sample_batch(self, round_index: int) -> list[TrainingSample]:
        made: list[Rollout] = []
        wanted = self.sizes.prompts_per_batch
        for refill in range(self.config.dynamic_sampling_max_rounds if self.config.dynamic_sampling else 1):
            rows = self._round_rows(round_index, refill)
            fresh = self._make_rollouts(rows, round_index, refill)
            if self.config.dynamic_sampling:
                fresh = rollouts.drop_equal_groups(fresh)
                self.metrics.put("rollout/dynamic_rounds", float(refill + 1))
            made += fresh
            groups = list(dict.fromkeys(rollout.group_id for rollout in made))
            if len(groups) >= wanted:
                kept = set(groups[:wanted])
                made = [rollout for rollout in made if rollout.group_id in kept]
                break
        return self._finish_rollouts(made)

    def _round_rows(self, round_index: int, refill: int) -> list[dict[str, Any]]:
        assert self.prompt_order is not None
        return [dict(self._rows[index]) for index in self.prompt_order.rows(round_index, refill)]

    def _make_rollouts(self, rows: list[dict[str, Any]], round_index: int, refill: int = 0) -> list[Rollout]:
        """Every process makes and scores its share of the groups; all get all of them."""
        count = self.sizes.generation_calls
        made: list[Rollout] = []
        for call in range(count):
            part = list(enumerate(rows))[call * len(rows) // count : (call + 1) * len(rows) // count]
            mine = batch_sizes.share(part, self.accelerator.process_index, self.accelerator.num_processes)
            group_ids = [f"step{self.state.global_step}-{refill}-{position}" for position, _ in mine]
            seed = derive_seed(self.config.seed, round_index, refill)
            with self.metrics.time("sampling"):
                local = self.rollout(
                    [row for _, row in mine], group_ids=group_ids, positions=[p for p, _ in mine], seed=seed, num_generations=self.sizes.num_generations
                )
            with self.metrics.time("scoring"):
                self.score(local)
            made += run_state.gather_lists(self.accelerator, local)
        return made

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
            self.metrics.put(f"rewards/{name}_failed", float(count))

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
            made, estimator=estimator_of(config), scale=scale_of(config), mask_truncated=config.mask_truncated_completions
        )
        self.metrics.put("reward_std", scored.reward_std)
        self.metrics.put("rollout/zero_variance_share", scored.zero_variance_share)
        self.metrics.put("rollout/num_set_aside", float(scored.num_set_aside))
        rollouts.store_completions(made, config, self.state.global_step, self.is_world_process_zero())
        return self.annotate(scored.samples, made)

    def sampling_settings(self, **changes: Any) -> SamplingSettings:
        """How completions are drawn, from the config; ``changes`` replace single values."""
        config = self.config
        values: dict[str, Any] = {
            "max_tokens": config.completion_limit,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "min_p": config.min_p,
            "repetition_penalty": config.repetition_penalty,
            "stop_token_ids": model_setup.stop_token_ids(self.accelerator.unwrap_model(self.model), self.processing_class),
            "regex": config.vllm_guided_decoding_regex,
            "logprobs_at_temperature": config.unbias_log_probabilities,
        }
        return SamplingSettings(**{**values, **changes})

    @property
    def sampler(self) -> Sampler:
        """The sampler, carrying the present weights."""
        return self.sampler_host.synced(self.policy_version)

    @property
    def policy_version(self) -> int:
        """Updates the present weights have seen."""
        return int(self.state.global_step)

    # ------------------------------------------------------------------ the update

    def _share_of_process(self, samples: list[TrainingSample], micro_steps: int) -> list[list[Microbatch]]:
        """This process's samples as micro-steps, each a list of pieces with a backward pass of its own."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        mine = batch_sizes.share(samples, rank, world)
        trained = [sample for sample in samples if sample.num_trained_tokens]
        pieces = [batch_sizes.pieces(part, self.config) for part in split_evenly(mine, micro_steps)]
        self._totals = StepTotals(
            num_sequences=float(len(samples)),
            num_tokens=float(sum(sample.num_trained_tokens for sample in trained)),
            num_microbatches=float(micro_steps * world),
        )
        batch_sizes.log_samples(self.metrics, samples, self.policy_version)
        return [[self._layout(piece) for piece in part] for part in pieces]

    def _layout(self, samples: list[TrainingSample]) -> Microbatch:
        batch = build_microbatch(
            samples or [batch_sizes.blank_sample(self.processing_class.pad_token_id)],
            layout=batch_sizes.choose_layout(self.config.packing, samples, self.accelerator.device, self.model),
            pad_id=self.processing_class.pad_token_id,
            device=self.accelerator.device,
            row_capacity=self.config.packing_row_length,
        )
        self.metrics.put("train/row_tokens", float(batch.num_input_tokens))
        return batch

    def _loss(self, model: Any, batch: Microbatch) -> LossResult:
        """The loss of one piece as its share of the step."""
        result = self.forward_logprobs(model, batch, with_entropy=True)
        logprobs = result.logprobs[:, 0]
        if batch.num_trained_tokens == 0:
            return LossResult(loss=result.logprobs.sum() * 0.0)
        if batch.old_logprobs is None:
            # the first pass over this batch happens before any update on it
            batch.old_logprobs = logprobs.detach()
        streams = TokenStreams(
            logprobs=logprobs,
            old_logprobs=self._ratio_denominator(batch),
            sampler_logprobs=batch.sampler_logprobs,
            advantages=batch.advantages,
            sample_index=batch.sample_index,
            sample_lengths=batch.sample_lengths,
            sft=batch.sft,
            entropy=result.entropy,
            ref_logprobs=self._reference_logprobs(model, batch),
            distill_policy_logprobs=None if batch.distill_ids is None else result.logprobs[:, 1:],
            distill_teacher_logprobs=batch.distill_logprobs,
        )
        return policy_loss(streams, self.loss_options, self._totals)

    def _ratio_denominator(self, batch: Microbatch) -> torch.Tensor:
        """[T] the sampler's log-probs where known; with an importance correction the trainer's own before the update."""
        assert batch.old_logprobs is not None
        if self.config.importance_correction != "none":
            return batch.old_logprobs
        return torch.where(torch.isnan(batch.sampler_logprobs), batch.old_logprobs, batch.sampler_logprobs)

    def _reference_logprobs(self, model: Any, batch: Microbatch) -> torch.Tensor | None:
        """[T] of the reference; kept over the iterations on a batch. None when beta is 0."""
        if self.config.beta == 0.0:
            return None
        if batch.ref_logprobs is None:
            given = batch.given_ref_logprobs
            if not bool(torch.isnan(given).any()):
                batch.ref_logprobs = given
                return given
            with torch.no_grad(), self.metrics.time("reference"):
                inner = self.accelerator.unwrap_model(model)
                if self.reference is not None:
                    with on_device(self.reference, self.accelerator.device, self.config.offload_untrained_models):
                        computed = self.forward_logprobs(self.reference, batch).logprobs[:, 0]
                elif model_setup.has_adapter(inner):
                    with adapter_disabled(inner):
                        computed = self.forward_logprobs(model, batch).logprobs[:, 0]
                else:
                    raise ConfigError("beta is above 0 but there is no reference model")
            batch.ref_logprobs = torch.where(torch.isnan(given), computed, given)
        return batch.ref_logprobs

    def _collect(self, result: LossResult) -> None:
        for name, value in result.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    # ------------------------------------------------------------------ around the step

    def close_step(self) -> None:
        """Metrics of the step that just ended, to the file, the window of the trackers and the live page."""
        batch_sizes.log_sums(self.metrics, run_state.sum_over_processes(self.accelerator, self._sums))
        values = self.metrics.close_step()
        values["train/learning_rate"] = float(self._get_learning_rate())
        if self._metrics_file is not None:
            self._metrics_file.write(self.state.global_step, values)
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
        return 6 * tokens * sum(parameter.numel() for parameter in self.model.parameters())

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if str(self.config.include_num_input_tokens_seen) not in {"no", "False"}:
            self.state.num_input_tokens_seen += sum(piece.num_input_tokens for piece in inputs) * self.accelerator.num_processes

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The rollout position goes in first, ``trainer_state.json`` last: a checkpoint with it is complete."""
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero():
            run_state.save(folder, self)
        super()._save_checkpoint(model, trial)
        if self.service is not None:
            self.service.commit(self.state.global_step)


class _StepHooks(TrainerCallback):  # type: ignore[misc]
    """Ties the sampler's version and the step's bookkeeping to the transformers loop."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self._update: contextlib.ExitStack | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run_state.restore(self._trainer)
        self._trainer.sampler_host.start()
        if self._trainer.service is not None:
            self._trainer.service.start()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._update = contextlib.ExitStack()
        self._update.enter_context(self._trainer.metrics.time("update"))
        self._update.enter_context(self._trainer.sampler_host.updating())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._update is not None:
            self._update.close()
            self._update = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        trainer = self._trainer
        run_state.sync_reference(trainer)
        trainer.close_step()
        if run_state.any_process(trainer.accelerator, trainer._stop.requested):
            logger.warning("stopping on request after step %d: saving a checkpoint", state.global_step)
            control.should_save = control.should_training_stop = True
        return control


def default_config(model: Any) -> GRPOConfig:
    """``GRPOConfig`` for a trainer that was given none."""
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "") or "model"
    return GRPOConfig(output_dir=f"{name.rstrip('/').split('/')[-1]}-GRPO")


def loss_options(config: GRPOConfig) -> LossOptions:
    """The loss's options from the config."""
    return LossOptions(
        loss_type=config.loss_type,  # type: ignore[arg-type]
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        delta=config.delta,
        beta=config.beta,
        kl_estimator=config.kl_estimator,  # type: ignore[arg-type]
        entropy_coef=config.entropy_coef,
        importance_correction=config.importance_correction,  # type: ignore[arg-type]
        importance_cap=config.importance_correction_cap,
        importance_level=config.importance_correction_level,  # type: ignore[arg-type]
        max_completion_length=config.completion_limit,
        distill_coef=config.distill_coef,
    )


def estimator_of(config: GRPOConfig) -> Any:
    """Which advantage the loss type asks for."""
    return {"rloo": "rloo", "reinforce++": "batch"}.get(config.loss_type, "group")


def scale_of(config: GRPOConfig) -> Any:
    """``scale_rewards``, or what the loss type prescribes."""
    if config.scale_rewards is not None:
        return config.scale_rewards
    return "none" if config.loss_type == "dr_grpo" else "group"


def _identity(rows: Any) -> Any:
    return rows


def _remember_grad_norm(trainer: GRPOTrainer) -> None:
    """Put the gradient norm that clipping computes into the step's metrics."""
    original: Callable[..., Any] = trainer.accelerator.clip_grad_norm_

    def clip(*args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        if norm is not None:
            trainer.metrics.put("train/grad_norm", float(norm))
        return norm

    trainer.accelerator.clip_grad_norm_ = clip
