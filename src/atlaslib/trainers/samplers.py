"""The sampler of a trainer: chosen from the config, started with training, kept at the present weights."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from atlaslib.errors import ConfigError, UnsupportedModelError
from atlaslib.generation.protocol import Sampler
from atlaslib.generation.replica import ReplicaSampler, whole_copy

if TYPE_CHECKING:
    from atlaslib.trainers.grpo import GRPOTrainer
    from atlaslib.trainers.grpo_config import GRPOConfig

logger = logging.getLogger(__name__)
CACHE_SHARE = 0.3
"""Of the GPU memory free at start, the most the engine's cache takes: the update needs the rest."""


class SamplerHost:
    """Owns the sampler and, when asked for, the policy server that lets environments sample from the live weights."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self._sampler: Sampler | None = None
        self._engine: Any = None
        self._thread: Any = None
        self._server: Any = None
        self._replica = whole_copy(trainer.model) if self._needs_replica() else None

    def _needs_replica(self) -> bool:
        """A sharded policy is sampled from a whole copy, made before it is sharded."""
        trainer = self._trainer
        wanted = trainer.config.sampler_kind == "engine"
        return wanted and (trainer.is_fsdp_enabled or (is_zero3(trainer) and trainer.config.ds3_gather_for_generation))

    @property
    def policy_server_url(self) -> str | None:
        """Where the policy server answers, once it runs."""
        return None if self._server is None else str(self._server.url)

    @property
    def engine(self) -> Any:
        """The embedded engine when that is the sampler and it has been made, else None."""
        return self._engine

    def start(self) -> None:
        """Called when training begins and the model is where it stays."""
        config = self._trainer.config
        if config.policy_server_port is not None and self._trainer.is_world_process_zero():
            self._make()
            self._start_thread()
            self._start_server()
        elif self._trainer.service is None and self._trainer.pipeline.is_asynchronous:
            self._make()
            if self._engine is None and config.sampler_kind == "engine":
                raise ConfigError(
                    "max_staleness above 0 needs the embedded engine or a vLLM server; this model cannot be sampled by the engine"
                )
            self._start_thread()
        if self._engine is not None:
            self._engine.version = self._trainer.policy_version
        self.push_to_environments()

    def push_to_environments(self) -> None:
        """Environments get the present weights; called by all processes, at the start and after each step.

        The engine that serves the policy itself has them already: this is for vLLM servers and for the copy of a sharded policy.
        """
        config = self._trainer.config
        copied = self._replica is not None and config.policy_server_port is not None
        if self._trainer.service is not None and (copied or config.sampler_kind == "vllm_server"):
            self.sync(self._trainer.policy_version)

    @property
    def sampler(self) -> Sampler:
        """The sampler; made on first use."""
        if self._sampler is None:
            self._make()
            assert self._sampler is not None
            self._sampler.sync(self._trainer.policy_version)
        return self._sampler

    def sync(self, version: int) -> None:
        """Bring the sampler to the present weights; called by the training thread while nobody writes them."""
        with self._trainer.metrics.time("sync"):
            self.sampler.sync(version)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """The optimizer writes weights inside this block."""
        if self._engine is None or self._replica is not None:
            yield
            return
        with self._engine.updating():
            yield

    @contextlib.contextmanager
    def exclusive_forward(self) -> Iterator[None]:
        """No engine step runs beside the trainer's forward pass: both use the same module."""
        if self._thread is None or self._replica is not None:
            yield
            return
        with self._engine.exclusive():
            yield

    @contextlib.contextmanager
    def exclusive_backward(self) -> Iterator[None]:
        """Where the backward pass runs forward passes again, no engine step runs beside it; otherwise sampling goes on."""
        config = self._trainer.config
        if self._thread is None or not (config.gradient_checkpointing or config.exact):
            yield
            return
        with self._engine.exclusive():
            yield

    def close(self) -> None:
        """Stop the engine's thread and the server; a later use starts anew."""
        # In this order, open requests are answered (503) before the server goes instead of being cut off.
        if self._thread is not None:
            self._thread.stop()
        if self._server is not None:
            self._server.stop()
        if self._sampler is not None:
            self._sampler.close()
        self._server = self._thread = self._sampler = self._engine = None

    def _make(self) -> None:
        if self._sampler is not None:
            return
        kind = self._trainer.config.sampler_kind
        if kind == "engine" and is_zero3(self._trainer) and self._replica is None:
            kind = "transformers"  # ds3_gather_for_generation=False: generate on the shards, all processes in step
        if kind == "engine":
            try:
                self._sampler = self._engine_sampler()
                return
            except UnsupportedModelError as error:
                if self._trainer.config.sampler == "engine" or self._trainer.config.policy_server_port is not None:
                    raise
                logger.warning("sampling with transformers' generate instead of the embedded engine: %s", error)
                kind = "transformers"
        self._sampler = _MAKERS[kind](self._trainer)

    def _engine_sampler(self) -> Sampler:
        from atlaslib.generation.engine_sampler import EngineSampler

        trainer = self._trainer
        in_flight = trainer.config.policy_server_port is not None or trainer.pipeline.is_asynchronous
        policy = trainer.accelerator.unwrap_model(trainer.model)
        model = policy if self._replica is None else self._replica.to(trainer.accelerator.device)
        self._engine = make_engine(
            model, trainer.processing_class, trainer.config, update_mode="in_flight" if in_flight else "drain"
        )
        self._engine.version = trainer.policy_version
        if self._replica is not None:
            return ReplicaSampler(self._engine, self._replica, policy)
        return EngineSampler(self._engine)

    def _start_thread(self) -> None:
        if self._engine is None:
            return
        from atlaslib.engine import EngineThread

        self._thread = EngineThread(self._engine)
        self._thread.start()
        self._sampler.thread = self._thread  # type: ignore[union-attr]

    def _start_server(self) -> None:
        from atlaslib.engine.server import serve_in_thread

        config = self._trainer.config
        self._server = serve_in_thread(
            self._thread,
            self._trainer.processing_class,
            config.policy_model_name,
            host=config.policy_server_host,
            port=config.policy_server_port or 0,
        )
        logger.info("the policy is served at %s", self._server.url)


def make_engine(model: Any, tokenizer: Any, config: GRPOConfig, **settings: Any) -> Any:
    """An engine beside the update: ``engine_kwargs`` win over ``settings``, and its cache leaves the update its memory."""
    from atlaslib.engine import Engine, EngineConfig

    chosen = {"memory_fraction": CACHE_SHARE, "exact": config.exact, **settings, **(config.engine_kwargs or {})}
    return Engine(model, tokenizer, EngineConfig(**chosen))


def is_zero3(trainer: GRPOTrainer) -> bool:
    """DeepSpeed with sharded parameters."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return plugin is not None and plugin.zero_stage == 3


def is_sharded(trainer: GRPOTrainer) -> bool:
    """Each process holds a part of the policy's weights: all of them take part in every pass."""
    return trainer.accelerator.num_processes > 1 and (is_zero3(trainer) or trainer.is_fsdp_enabled)


def _transformers_sampler(trainer: GRPOTrainer) -> Sampler:
    from atlaslib.generation.transformers_sampler import TransformersSampler

    return TransformersSampler(
        trainer.accelerator.unwrap_model(trainer.model),
        pad_id=trainer.processing_class.pad_token_id,
        synced_gpus=is_sharded(trainer),
    )


def _vllm_sampler(trainer: GRPOTrainer) -> Sampler:
    from atlaslib.generation.vllm_sampler import VLLMSampler

    return VLLMSampler(trainer)


def _vllm_server_sampler(trainer: GRPOTrainer) -> Sampler:
    from atlaslib.generation.vllm_server_sampler import VLLMServerSampler

    return VLLMServerSampler.for_trainer(trainer)


_MAKERS = {
    "transformers": _transformers_sampler,
    "vllm": _vllm_sampler,
    "vllm_server": _vllm_server_sampler,
}
