"""Compiled layers: the same numbers, and the model as it was afterwards."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atlaslib.data.packing import build_microbatch
from atlaslib.trainers import update
from atlaslib.trainers.compiled import CompiledModules
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.policy import PolicyForward
from atlaslib.types import TrainingSample

# the compiler itself looks at the gradients of inner tensors
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
WEIGHTS = torch.arange(11.0)


def sample(prompt: list[int], completion: list[int], group: str) -> TrainingSample:
    total = len(prompt) + len(completion)
    return TrainingSample(
        token_ids=[*prompt, *completion],
        loss_mask=[False] * len(prompt) + [True] * len(completion),
        advantages=[0.5] * total,
        reward=1.0,
        group_id=group,
    )


SAMPLES = [
    sample([5, 6, 7], [8, 9], "g"),
    sample([5, 6, 7], [10, 11, 12], "g"),
    sample([20, 21], [22], "h"),
    sample([30], [31, 32, 33, 34, 35], "i"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(model: Any, layout: Any, around: Any) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    forward = PolicyForward(unwrap=lambda it: it, **({"around": around} if around else {}))
    logprobs = forward(model, build_microbatch(SAMPLES, layout=layout)).logprobs[:, 0]
    (logprobs * WEIGHTS).sum().backward()
    return logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


class CountingBackend:
    """Compiles nothing, counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def test_same_numbers_in_every_layout(tiny_model: Any) -> None:
    around = CompiledModules(backend="aot_eager")
    for layout in ("padded", "packed", "shared_prefix"):
        expected, got = run(tiny_model, layout, None), run(tiny_model, layout, around)
        torch.testing.assert_close(got[0], expected[0], rtol=0, atol=2e-6)
        torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=2e-5)
        assert around.works
    assert not any("forward" in module.__dict__ for module in tiny_model.modules())


@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
def test_all_layers_share_one_graph(tiny_model: Any, layout: str) -> None:
    backend = CountingBackend()
    run(tiny_model, layout, CompiledModules(backend=backend))
    assert tiny_model.config.num_hidden_layers == 2
    assert backend.graphs == 2  # the layer and the last norm, without breaks


def test_layers_with_adapters_stay_as_they_are(tiny_model: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(tiny_model, config).get_base_model()
    with CompiledModules(backend="eager")(adapted):
        swapped = {type(module).__name__ for module in adapted.modules() if "forward" in module.__dict__}
    assert swapped == {"LlamaRMSNorm", "LlamaMLP"}


def test_a_compiler_that_fails_is_left_out(tiny_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    around = CompiledModules(backend=broken)
    with caplog.at_level(logging.WARNING, logger="atlaslib.trainers.compiled"):
        got = run(tiny_model, "padded", around)
    assert sum("is not compiled" in record.message for record in caplog.records) == 1
    assert "no compiler here" in caplog.text
    torch.testing.assert_close(got[0], run(tiny_model, "padded", None)[0], rtol=0, atol=2e-6)


def test_checkpointed_models_are_not_compiled(tiny_model: Any) -> None:
    expected = run(tiny_model, "padded", None)
    tiny_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tiny_model.train()
    backend = CountingBackend()
    got = run(tiny_model, "padded", CompiledModules(backend=backend))
    assert backend.graphs == 0
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("options", "device", "processes", "expected"),
    [
        ({}, "cuda", 1, True),
        ({}, "cpu", 1, False),
        ({}, "cuda", 2, False),
        ({"gradient_checkpointing": True}, "cuda", 1, False),
        ({"deterministic": True}, "cuda", 1, False),
        ({"compile_modules": False}, "cuda", 1, False),
        ({"compile_modules": True}, "cpu", 1, True),
    ],
)
def test_where_layers_are_compiled(
    options: dict[str, bool], device: str, processes: int, expected: bool, tmp_path: Any
) -> None:
    config = GRPOConfig(output_dir=str(tmp_path), report_to="none", **options)
    accelerator = SimpleNamespace(device=torch.device(device), num_processes=processes)
    assert update._compiles(config, accelerator) is expected
