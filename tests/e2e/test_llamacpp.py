"""The OpenAI path against a real server that is not ours: llama.cpp with SmolLM2's own GGUF file.

`make llamacpp` installs `xllamacpp` (a prebuilt llama.cpp, seconds) into an environment of its own and runs this; once that is
there, `make test` runs it too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from atlaslib.errors import ConfigError, MissingExtraError
from atlaslib.generation.protocol import SamplingSettings
from atlaslib.generation.students import EndpointStudent
from atlaslib.models.tiny import tiny_llama
from atlaslib.trainers.grpo_config import GRPOConfig
from atlaslib.trainers.teacher_trainers import TeacherGRPOTrainer
from atroposlib.envs.quickstart_env import ConciseSums
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager

ROOT = Path(__file__).parents[2]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
DEFAULT_PYTHON = ROOT / ".cache" / "llamacpp-venv" / "bin" / "python"


def python_with_llamacpp() -> str:
    if find_spec("xllamacpp") is not None:
        return sys.executable
    named = os.environ.get("ATROPOS_LLAMACPP", str(DEFAULT_PYTHON))
    if not Path(named).exists():
        pytest.skip("no llama.cpp: the package xllamacpp is not installed (`make llamacpp` does it)")
    return named


@pytest.fixture(scope="module")
def llamacpp_url() -> Iterator[str]:
    """The address of a llama.cpp server, with /v1."""
    from atlaslib.models.smollm2 import smollm2_gguf

    python = python_with_llamacpp()
    try:
        gguf = smollm2_gguf()
    except (ConfigError, MissingExtraError) as error:
        pytest.skip(f"no SmolLM2: {error}")
    command = [python, str(Path(__file__).with_name("llamacpp_server.py")), str(gguf)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        yield f"{url}/v1"
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
async def servers(llamacpp_url: str) -> Any:
    manager = ServerManager(
        [APIServerConfig(base_url=llamacpp_url, model_name="smollm2", server_type="openai", timeout=120)], slurm=False
    )
    yield manager
    for server in manager.servers:
        await server.aclose()


@pytest.mark.timeout(120)
async def test_chat_completions(servers: ServerManager) -> None:
    greedy = [await servers.chat_completion(messages=CHAT, max_tokens=6, temperature=0.0) for _ in range(2)]
    assert greedy[0].choices[0].message.content == greedy[1].choices[0].message.content != ""
    assert greedy[0].usage.prompt_tokens == 37  # with the system prompt of the model's own template
    several = await servers.chat_completion(messages=CHAT, n=3, max_tokens=5, temperature=1.0, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert all(choice.finish_reason == "length" for choice in several.choices)
    assert len({choice.message.content for choice in several.choices}) > 1


@pytest.mark.timeout(120)
async def test_log_probs_belong_to_the_text_and_are_those_of_the_model(servers: ServerManager) -> None:
    """Entries are counted before they are used: the server may merge tokens into one entry."""
    reply = await servers.chat_completion(messages=CHAT, max_tokens=8, temperature=0.0, logprobs=True, top_logprobs=2)
    entries = reply.choices[0].logprobs.content
    assert len(entries) == reply.usage.completion_tokens
    # The end of the turn is an entry of its own that is not in the text.
    text = "".join(entry.token for entry in entries if not entry.token.startswith("<|"))
    assert text == reply.choices[0].message.content
    ids = [entry.id for entry in entries]  # an addition of llama.cpp's
    expected = our_logprobs(CHAT, ids)
    assert sum(abs(entry.logprob - value) for entry, value in zip(entries, expected, strict=True)) / len(ids) < 0.3


def our_logprobs(chat: list[dict[str, str]], ids: list[int]) -> list[float]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from atlaslib.engine import Engine
    from atlaslib.models.smollm2 import smollm2_folder

    folder = str(smollm2_folder())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    engine = Engine(AutoModelForCausalLM.from_pretrained(folder), tokenizer)
    return engine.score([[*prompt, *ids]])[0][len(prompt) :]


@pytest.mark.timeout(120)
async def test_completions(servers: ServerManager) -> None:
    reply = await servers.completion(prompt="The capital of France is", max_tokens=3, temperature=0.0, n=2)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert all("Paris" in choice.text for choice in reply.choices)


@pytest.mark.timeout(120)
async def test_exact_tokens_are_refused_with_the_reason(servers: ServerManager) -> None:
    with pytest.raises(NotImplementedError, match="server_type"):
        await servers.tokens_and_logprobs_completion(prompt="hello", max_tokens=2)


@pytest.mark.timeout(120)
async def test_an_environment_evaluates_on_it(llamacpp_url: str) -> None:
    from atlaslib.models.smollm2 import smollm2_folder

    config, _ = ConciseSums.config_init()
    config.tokenizer_name, config.data_dir_to_save_evals = str(smollm2_folder()), None
    server = APIServerConfig(base_url=llamacpp_url, model_name="smollm2", server_type="openai", timeout=120)
    environment = ConciseSums(config, [server], slurm=False)
    await environment.setup()
    environment.held_out = [(2, 2), (1, 1), (3, 4)]
    metrics = await environment.evaluate()
    assert set(metrics) == {"eval/held_out_score", "eval/held_out_exact"}
    assert 0.0 <= metrics["eval/held_out_exact"] <= 1.0
    for each in environment.server.servers:
        await each.aclose()


@pytest.mark.timeout(120)
def test_a_student_behind_it(llamacpp_url: str) -> None:
    student = EndpointStudent(llamacpp_url, model="smollm2")
    settings = SamplingSettings(max_tokens=6, temperature=1.0)
    chats = [CHAT, [{"role": "user", "content": "Say hello."}]]
    replies = student.answer(chats, settings, seed=3)
    assert all(1 <= reply.num_tokens <= 6 and reply.text for reply in replies)


@pytest.mark.timeout(240)
def test_a_teacher_is_trained_with_that_student(llamacpp_url: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    config = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=2, max_completion_length=6, max_probe_tokens=6, max_steps=1,
        beta=0.0, temperature=1.0, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    rows = [{"prompt": "What is 2+2?", "ground_truth": "4"}, {"prompt": "What is 1+1?", "ground_truth": "2"}]
    teacher = tiny_llama(len(tiny_tokenizer), max_len=1024)
    trainer = TeacherGRPOTrainer(
        teacher,
        args=config,
        train_dataset=rows,
        processing_class=tiny_tokenizer,
        student_model=llamacpp_url,
        logging_prob=1.0,
    )
    trainer.train()
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert 1 <= line["student_approach_length"] <= 6
    assert 0.0 <= line["student_accuracy"] <= 1.0
    assert list((tmp_path / "teacher_chats").iterdir())
