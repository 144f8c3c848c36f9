"""``TeacherGRPOTrainer``: a teacher learns to teach a frozen student, rewarded by how much better the student answers.

Only how rollouts are made differs from :class:`GRPOTrainer`:

    rollout    student: baseline and probe, once per prompt
               teacher: completions of the teacher's own prompt (these are trained)
               student: an answer with each teaching
    score      the reward functions see every role's text and token counts
    annotate   metrics of teaching, successful teachings saved
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlaslib.errors import ConfigError, UnsupportedModelError
from atlaslib.generation.protocol import Sampler, SamplingSettings
from atlaslib.generation.students import EndpointStudent, ModelStudent, Student
from atlaslib.rewards.reward_calls import on_device
from atlaslib.rewards.teaching import TeachingReward
from atlaslib.trainers import model_setup
from atlaslib.trainers.grpo import GRPOTrainer
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.rollouts import Rollout
from atlaslib.trainers.samplers import is_sharded, make_engine
from atlaslib.trainers.teaching_dialogue import TeachingTemplates
from atlaslib.trainers.teaching_round import TeachingRound, save_dialogues, save_successes, teaching_metrics
from atlaslib.types import TrainingSample

logger = logging.getLogger(__name__)


class TeacherGRPOTrainer(GRPOTrainer):
    """GRPO for a teacher.

    ``student_model`` is a frozen model (object, folder or hub id), an OpenAI-compatible endpoint (``"http://host:port/v1"`` or an
    :class:`EndpointStudent`), any object with ``answer(chats, settings, seed=...)``, or None: the policy as it was at the start.
    Without ``reward_funcs`` the reward is :class:`~atlaslib.rewards.teaching.TeachingReward`. ``logging_prob`` is the share of dialogues
    written to ``output_dir/teacher_chats``.

    Example::

        trainer = TeacherGRPOTrainer(config, student_model="small/student", train_dataset=rows)  # rows: prompt, ground_truth
        trainer.train()
    """

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *positional: Any,
        student_model: Any = None,
        student_processing_class: Any = None,
        student_model_init_kwargs: dict[str, Any] | None = None,
        disable_student_offloading: bool = False,
        logging_prob: float = 0.0,
        student_temperature: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model, reward_funcs or TeachingReward(), args, train_dataset, eval_dataset, *positional, **kwargs
        )
        if self.service is not None:
            raise ConfigError("a teacher makes its own rollouts; leave rollout_server_url out")
        if not 0.0 <= logging_prob <= 1.0:
            raise ConfigError(
                f"logging_prob is {logging_prob}; it is the share of dialogues to write down, between 0 and 1"
            )
        self.logging_prob = logging_prob
        config = self.config
        self.student = self._make_student(
            student_model,
            tokenizer=student_processing_class,
            init_kwargs=student_model_init_kwargs,
            offload=config.offload_untrained_models and not disable_student_offloading,
        )
        changes = {} if student_temperature is None else {"temperature": student_temperature}
        self.teaching = TeachingRound(
            templates=TeachingTemplates.build(
                baseline=config.student_baseline_template,
                diagnostic=config.student_diagnostic_template,
                teacher=config.teacher_adaptive_template,
                guided=config.student_with_teaching_template,
            ),
            student=self.student,
            answer_settings=self.sampling_settings(regex=None, **changes),
            probe_settings=self.sampling_settings(
                regex=None, max_tokens=config.max_probe_tokens or config.completion_limit, **changes
            ),
        )

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
        """The teacher's completions, each with what the student made of it."""
        if not rows and not is_sharded(self):
            return []
        starts = self.teaching.ask_student(rows, seed=seed, positions=positions)
        made = super().rollout(
            self.teaching.teacher_rows(rows, starts),
            group_ids=group_ids,
            positions=positions,
            seed=seed,
            num_generations=num_generations,
            settings=settings,
        )
        self.teaching.teach(rows, starts, made, tokenizer=self.processing_class, seed=seed, positions=positions)
        return made

    def annotate(self, samples: list[TrainingSample], made: Sequence[Rollout]) -> list[TrainingSample]:
        """Metrics over all processes' rollouts; successes saved by the first process."""
        for name, value in teaching_metrics(made).items():
            self.metrics.put(name, value)
        if self.is_world_process_zero():
            output = Path(self.config.output_dir)
            save_successes(made, output / "successful_teaching", self.state.global_step)
            save_dialogues(
                made, output / "teacher_chats", self.state.global_step, share=self.logging_prob, seed=self.config.seed
            )
        return super().annotate(samples, made)

    def evaluation_metrics(self, made: Sequence[Rollout]) -> dict[str, float]:
        """What an evaluation reports beyond rewards and lengths."""
        return {**super().evaluation_metrics(made), **teaching_metrics(made)}

    # ------------------------------------------------------------------ the student

    def _make_student(
        self, student: Any, *, tokenizer: Any, init_kwargs: dict[str, Any] | None, offload: bool
    ) -> Student:
        if isinstance(student, str) and student.startswith(("http://", "https://")):
            return EndpointStudent(student)
        if hasattr(student, "answer"):
            return student  # type: ignore[no-any-return]
        if student is None:
            return self._own_student(tokenizer, offload)
        if isinstance(student, str):
            student = model_setup.load_causal_lm(student, self.config, init_kwargs)
        elif init_kwargs:
            raise ConfigError(
                "student_model_init_kwargs are for a student given by name; the trainer was handed a model object"
            )
        return self._model_student(model_setup.freeze(student), tokenizer, offload)

    def _own_student(self, tokenizer: Any, offload: bool) -> Student:
        """The policy of the start: the reference where it stays as it is, else a copy of its own."""
        policy = self.accelerator.unwrap_model(self.model)
        if model_setup.has_adapter(policy):
            return self._adapter_student(policy, tokenizer)
        still = self.reference is not None and not self.config.sync_ref_model and self.config.staleness_bound == 0
        student = self.reference if still else model_setup.freeze(copy.deepcopy(policy))
        return self._model_student(student, tokenizer or self.processing_class, offload)

    def _model_student(self, model: Any, tokenizer: Any, offload: bool) -> Student:
        tokenizer = tokenizer or self._student_tokenizer(model)
        model.to("cpu" if offload else self.accelerator.device)
        return ModelStudent(
            self._student_sampler(model, tokenizer, offload),
            tokenizer,
            max_prompt_length=None,
            stop_token_ids=model_setup.stop_token_ids(model, tokenizer),
        )

    def _adapter_student(self, policy: Any, tokenizer: Any) -> Student:
        """With an adapter the student is the policy's base: the same weights, the adapter switched off while it answers."""
        from atlaslib.generation.transformers_sampler import TransformersSampler

        tokenizer = tokenizer or self.processing_class
        sampler = TransformersSampler(
            policy,
            pad_id=tokenizer.pad_token_id,
            around_generation=policy.disable_adapter,
            synced_gpus=is_sharded(self),
        )
        return ModelStudent(
            sampler, tokenizer, max_prompt_length=None, stop_token_ids=model_setup.stop_token_ids(policy, tokenizer)
        )

    def _student_sampler(self, model: Any, tokenizer: Any, offload: bool) -> Sampler:
        from atlaslib.generation.engine_sampler import EngineSampler
        from atlaslib.generation.transformers_sampler import TransformersSampler

        if not offload and self.config.sampler_kind == "engine":
            try:
                return EngineSampler(make_engine(model, tokenizer, self.config))
            except UnsupportedModelError as error:
                if self.config.sampler == "engine":
                    raise
                logger.warning(
                    "the student answers with transformers' generate instead of the embedded engine: %s", error
                )
        device = self.accelerator.device
        around = (lambda: on_device(model, device, True)) if offload else contextlib.nullcontext
        return TransformersSampler(model, pad_id=tokenizer.pad_token_id or 0, around_generation=around)

    def _student_tokenizer(self, model: Any) -> Any:
        name = getattr(model.config, "_name_or_path", "")
        if name:
            from transformers import AutoTokenizer

            with contextlib.suppress(OSError, ValueError):
                return model_setup.load_tokenizer(AutoTokenizer.from_pretrained(name), model, self.config)
        if model.config.vocab_size < len(self.processing_class):
            raise ConfigError(
                f"the student has {model.config.vocab_size} token ids, the policy's tokenizer {len(self.processing_class)}; pass student_processing_class"
            )
        logger.info("the student has no tokenizer of its own; it gets the policy's")
        return self.processing_class
