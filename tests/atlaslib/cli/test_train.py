"""``atropos train``: reading parameters, help without torch, a run from the command line."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atlaslib.cli.train import help_text, main, parse, read_rows
from atlaslib.errors import ConfigError
from atlaslib.launch.folder_lock import hold_folder


def test_forms_of_a_parameter(tmp_path: Path) -> None:
    file = tmp_path / "base.yaml"
    file.write_text("learning_rate: 1e-4\nbeta: 0.5\nmodel_init_kwargs:\n  dtype: float32\n")
    settings = parse(
        [
            str(file),
            "learning_rate=2e-5",
            "--num-generations",
            "4",
            "--reward_weights=1,0.5",
            "--gradient_checkpointing",
            "top_k=none",
            "model_init_kwargs.attn_implementation=eager",
            "--report_to",
            "wandb,tensorboard",
            "--max_steps",
            "-1",
            "peft.r=8",
            "train_dataset=rows.jsonl",
            "optim=sgd",
        ]
    )
    assert settings == {
        "learning_rate": 2e-5,
        "beta": 0.5,
        "num_generations": 4,
        "reward_weights": [1, 0.5],
        "gradient_checkpointing": True,
        "top_k": None,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager"},
        "report_to": ["wandb", "tensorboard"],
        "max_steps": -1,
        "peft": {"r": 8},
        "train_dataset": "rows.jsonl",
        "optim": "sgd",
    }


def test_none_is_nothing_except_where_it_is_a_choice() -> None:
    words = ["metrics_file=none", "rollout_server_url=None", "model_init_kwargs=none", "max_staleness=none"]
    assert parse(words) == dict.fromkeys(word.partition("=")[0] for word in words)
    assert parse(["report_to=none", "scale_rewards=none", "importance_correction=none"]) == {
        "report_to": "none",
        "scale_rewards": "none",
        "importance_correction": "none",
    }
    assert parse(["report_to=null", "scale_rewards=null"]) == {"report_to": None, "scale_rewards": None}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lerning_rate=1"], "did you mean 'learning_rate'"),
        (["--save_total_limt", "2"], "did you mean 'save_total_limit'"),
        (["beta=much"], "beta='much': expected float"),
        (["beta.x=1"], "beta is not a table"),
        (["missing.yaml"], "does not exist"),
        (["word"], "cannot read 'word'"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(words)


@pytest.mark.parametrize("content", [b"a: [", b"\xff\xfe\x00binary"])
def test_a_yaml_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"run.yaml is not valid YAML"):
        parse([str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b'{"prompt": "a"}\n{"prompt": \n', r"rows.jsonl, line 2 is not valid JSON .*'{\"prompt\": '"),
        ("rows.json", b"[1", "rows.json is not valid JSON"),
        ("rows.json", b'{"prompt": "a"}', "must hold a list of rows"),
        ("rows.jsonl", b'"a"\n', "each an object"),
        ("rows.jsonl", b"\xff\xfe", "is not text"),
    ],
)
def test_data_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_rows(tmp_path / name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer=gkd", "reward_funcs=accuracy", "teacher_model=x"], "leave reward_funcs out"),
        (["trainer=gkd"], "trainer=gkd needs a teacher"),
        (["trainer=gkd", "teacher_model=x", "trainer_kwargs.mixx=0.5"], "did you mean 'trainer_kwargs.mix'"),
        (["trainer_kwargs.callback=1"], "did you mean 'trainer_kwargs.callbacks'"),
    ],
)
def test_arguments_no_trainer_takes_are_named(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        main([f"output_dir={tmp_path}", "use_cpu=true", "report_to=none", *words])


def test_a_row_may_hold_any_character(tmp_path: Path) -> None:
    rows = [{"prompt": "first\u2028second"}, {"prompt": "b\x85c"}]
    (tmp_path / "rows.jsonl").write_text("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n\n")
    assert read_rows(tmp_path / "rows.jsonl") == rows


def test_help_lists_every_parameter_with_its_documentation() -> None:
    import dataclasses

    from atlaslib.trainers import GRPOConfig

    text = help_text()
    for field in dataclasses.fields(GRPOConfig):
        if field.init:
            assert f"  {field.name}=" in text
    assert "Weight of the KL term to the reference" in text


def test_help_is_quick_and_does_without_torch() -> None:
    code = "import sys; from atlaslib.cli.train import main; main(['--help']); assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    started = time.process_time()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "num_generations=8" in result.stdout
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_the_trainer_waits_for_is_shown_by_the_first_process(rank: str) -> None:
    code = (
        "import logging; from atlaslib.cli import train\n"
        "train.train = lambda *_: logging.getLogger('atlaslib.data.rollout_source').info('waiting 15 s for a batch') or 0\n"
        "train.main(['max_steps=1'])"
    )
    environment = {**os.environ, "RANK": rank}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ("INFO atlaslib.data.rollout_source: waiting 15 s for a batch" in result.stderr) == (rank == "0")


def test_as_a_module_for_launchers_a_mistake_is_one_line() -> None:
    command = [sys.executable, "-m", "atlaslib.cli.train", "max_stepss=1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "atropos train: unknown parameter 'max_stepss'; did you mean 'max_steps'?\n"


@pytest.fixture
def small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any) -> list[str]:
    """The words of a run in ``tmp_path``, the present folder; its reward interrupts it at the call ``INTERRUPT`` names."""
    from atlaslib.models.tiny import tiny_model_folder

    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    folder = tiny_model_folder(tmp_path / "model", vocab_size=len(tiny_tokenizer), hidden=32)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"ask {n}"}) + "\n" for n in range(4)))
    (tmp_path / "my_rewards.py").write_text(
        "import os, signal\ncalls = []\ndef variety(completions, **_):\n"
        "    calls.append(1)\n    if os.environ.get('INTERRUPT') == str(len(calls)): os.kill(os.getpid(), signal.SIGINT)\n"
        "    return [float(len(set(text))) for text in completions]\n"
    )
    return [
        f"model_name_or_path={folder}",
        "train_dataset=rows.jsonl",
        "reward_funcs=my_rewards:variety",
        "output_dir=out",
        "report_to=none",
        "per_device_train_batch_size=4",
        "num_generations=4",
        "max_completion_length=4",
        "use_cpu=true",
        "disable_tqdm=true",
        "beta=0",
        "peft.r=2",
        "peft.target_modules=[q_proj]",
    ]


def test_a_run_from_the_command_line(small_run: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = small_run
    caplog.set_level(logging.INFO, logger="atlaslib.cli.train")
    assert main([*words, "max_steps=1"]) == 0
    assert json.loads((tmp_path / "out" / "metrics.jsonl").read_text())["step"] == 1
    assert (tmp_path / "out" / "final_model" / "adapter_config.json").is_file()
    assert "going on from" not in caplog.text
    assert main([*words, "max_steps=2"]) == 0
    assert "going on from out/checkpoint-1" in caplog.text


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Also where the tests run in the background, with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
@pytest.mark.parametrize(
    ("save_steps", "message"),
    [(1, r"; the newest checkpoint is out/checkpoint-\d \("), (50, r"; there is no checkpoint yet \(save_steps ")],
)
def test_ctrl_c_says_where_the_checkpoint_is(
    small_run: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    save_steps: int,
    message: str,
) -> None:
    monkeypatch.setenv("INTERRUPT", "4")
    caplog.set_level(logging.INFO, logger="atlaslib.cli.train")
    with pytest.raises(KeyboardInterrupt):
        main([*small_run, "max_steps=20", f"save_steps={save_steps}"])
    assert re.fullmatch(r"stopped after \d steps" + message + ".*", caplog.messages[-1])


def test_a_folder_another_run_writes_into_is_refused(small_run: list[str], tmp_path: Path) -> None:
    with hold_folder(Path("out"), "output_dir"):
        with pytest.raises(ConfigError, match=rf"^output_dir: out is used by another run \(process {os.getpid()}\)"):
            main([*small_run, "max_steps=1"])
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["lock"]


def test_smollm2_is_a_name_for_every_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atlaslib.models.smollm2.smollm2_folder", lambda: tmp_path / "where-it-is")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hello", "ground_truth": "1"}\n')
    with pytest.raises(ConfigError, match="where-it-is"):
        main(
            [
                "trainer=teacher",
                "model_name_or_path=smollm2",
                f"train_dataset={rows}",
                "report_to=none",
                "use_cpu=true",
                f"output_dir={tmp_path}",
            ]
        )
