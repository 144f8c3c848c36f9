"""The distillation environment: teacher data on every group, refusal of other vocabularies, any constructor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs import teacher_distillation_env as module
from atroposlib.envs.base import APIServerConfig, BaseEnv, ServerBaseline
from atroposlib.envs.env_cli import build_env, resolve
from atroposlib.envs.teacher_distillation_env import TeacherDistillationConfig, TeacherDistillationEnv

TEACHER = APIServerConfig(
    model_name="t", base_url="http://127.0.0.1:1/v1", api_key="x", server_type="vllm", health_check=False
)


class Teacher:
    """Answers with two candidates per position; may fail or answer short."""

    def __init__(self, *, fail_on_call: int = -1, drop_last: bool = False) -> None:
        self.calls: list[dict[str, Any]] = []
        self.fail_on_call, self.drop_last = fail_on_call, drop_last

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        self.calls.append(kwargs)
        if len(self.calls) == self.fail_on_call:
            raise RuntimeError("teacher is away")
        ids = kwargs["input_ids"][: -1 if self.drop_last else None]
        return {
            "prompt_tokens": ids,
            "prompt_topk_token_ids": [[t, t + 1] for t in ids],
            "prompt_topk_logprobs": [[-0.1, -0.2] for _ in ids],
        }


class Distill(TeacherDistillationEnv):
    async def setup(self) -> None: ...

    async def get_next_item(self) -> Any:
        return None

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return None


def bare(teacher: Any, **config: Any) -> Any:
    env = object.__new__(Distill)
    env.config = SimpleNamespace(**{"teacher_enabled": True, "teacher_top_k": 2, **config})
    env.teacher_server = teacher
    return env


def group(**more: Any) -> dict[str, Any]:
    return {
        "tokens": [[1, 2, 3], [4, 5]],
        "masks": [[-100, 2, 3], [-100, 5]],
        "scores": [1.0, 0.0],
        "group_overrides": None,
        **more,
    }


async def test_attaches_both_fields_with_the_right_call() -> None:
    teacher = Teacher()
    out = await bare(teacher)._attach_teacher_distillation(group())
    assert out["distill_token_ids"] == [[[1, 2], [2, 3], [3, 4]], [[4, 5], [5, 6]]]
    assert out["distill_logprobs"] == [[[-0.1, -0.2]] * 3, [[-0.1, -0.2]] * 2]
    assert teacher.calls[0] == {"input_ids": [1, 2, 3], "top_k": 2, "max_tokens": 1, "split": "train"}


@pytest.mark.parametrize("teacher", [Teacher(fail_on_call=2), Teacher(drop_last=True)])
async def test_any_failure_means_no_data_for_the_group(teacher: Teacher, caplog: pytest.LogCaptureFixture) -> None:
    env = bare(teacher)
    out = await env._attach_teacher_distillation(group())
    assert (out["distill_token_ids"], out["distill_logprobs"]) == (None, None)
    assert env.num_teacher_failures == 1
    assert "teacher" in caplog.text


@pytest.mark.parametrize(
    ("config", "overrides", "expected_top_k"),
    [
        ({"teacher_top_k": 0}, None, 0),
        ({"teacher_top_k": 2}, {"teacher_top_k": 7}, 7),
        ({"teacher_top_k": -1}, None, None),
        ({"teacher_top_k": 2}, {"skip_teacher_top_k": True}, None),
        ({"teacher_enabled": False}, None, None),
    ],
)
async def test_top_k(config: dict[str, Any], overrides: Any, expected_top_k: int | None) -> None:
    teacher = Teacher()
    out = await bare(teacher, **config)._attach_teacher_distillation(group(group_overrides=overrides))
    assert {call["top_k"] for call in teacher.calls} == (set() if expected_top_k is None else {expected_top_k})
    assert (out.get("distill_token_ids") is None) == (expected_top_k is None)


async def test_groups_are_enriched_before_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    async def record(self: Any, scored_data: Any, item: Any, **kwargs: Any) -> None:
        sent.append(scored_data)

    monkeypatch.setattr(BaseEnv, "handle_send_to_api", record)
    env = bare(Teacher())
    await env.handle_send_to_api(group())
    await env.handle_send_to_api([group(), None])
    assert sent[0]["distill_logprobs"] is not None
    assert sent[1][0]["distill_logprobs"] is not None
    assert sent[1][1] is None


def config_for(folder: Path, **more: Any) -> TeacherDistillationConfig:
    return TeacherDistillationConfig(
        tokenizer_name=str(folder), use_wandb=False, teacher_enabled=True, teacher_top_k=2, **more
    )


def test_a_teacher_must_be_named(tiny_tokenizer_dir: Path) -> None:
    with pytest.raises(ValueError, match="no teacher server configuration was provided"):
        Distill(config_for(tiny_tokenizer_dir), [TEACHER])
    assert TeacherDistillationConfig().teacher_enabled is False
    with pytest.raises(ValueError):
        TeacherDistillationConfig(teacher_top_k=-2)


def test_tokenizers_must_match(tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    same = TEACHER.model_copy(update={"tokenizer_name": str(tiny_tokenizer_dir)})
    assert len(Distill(config_for(tiny_tokenizer_dir), [TEACHER], same).teacher_server.servers) == 1
    missing = TEACHER.model_copy(update={"tokenizer_name": "none", "model_name": str(tmp_path / "nothing")})
    with pytest.raises(ValueError, match="Cross-tokenizer distillation is not supported"):
        Distill(config_for(tiny_tokenizer_dir), [TEACHER], [missing])


def test_another_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env = bare(None)
    env.tokenizer = SimpleNamespace(name_or_path="student", get_vocab=lambda: {"a": 1})
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained",
        lambda *args, **kwargs: SimpleNamespace(get_vocab=lambda: {"b": 1}),
    )
    with pytest.raises(ValueError, match="Cross-tokenizer distillation is not supported"):
        env._validate_teacher_tokenizer_compatibility(teacher_tokenizer_name="teacher")
    env._validate_teacher_tokenizer_compatibility(teacher_tokenizer_name="student")


def test_teacher_manager_is_built_with_exactly_these_arguments(
    monkeypatch: pytest.MonkeyPatch, tiny_tokenizer_dir: Path
) -> None:
    built: list[Any] = []
    monkeypatch.setattr(
        module, "ServerManager", lambda configs, slurm, testing: built.append((configs, slurm, testing))
    )
    same = TEACHER.model_copy(update={"tokenizer_name": str(tiny_tokenizer_dir)})
    Distill(config_for(tiny_tokenizer_dir), [TEACHER], teacher_server_configs=same, testing=True)
    assert built == [([same], False, False)]


class Plain(BaseEnv):
    """An environment as they are usually written: four positional arguments, no word of a teacher."""

    def __init__(self, config: Any, server_configs: Any, slurm: bool = True, testing: bool = False) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.seen = (slurm, testing)

    async def setup(self) -> None: ...

    async def get_next_item(self) -> Any:
        return None

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return None


class PlainWithTeacher(Plain, TeacherDistillationEnv):
    env_config_cls = TeacherDistillationConfig
    tokenizer_folder = ""

    @classmethod
    def config_init(cls) -> Any:
        return config_for(Path(cls.tokenizer_folder)), ServerBaseline()


def test_mixed_into_an_environment_that_knows_no_teacher(
    tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainWithTeacher, "tokenizer_folder", str(tiny_tokenizer_dir))
    flags = [
        "--teacher.base_url",
        "http://127.0.0.1:2/v1",
        "--teacher.model_name",
        str(tiny_tokenizer_dir),
        "--teacher.server_type",
        "vllm",
    ]
    env: Any = build_env(
        PlainWithTeacher, resolve(PlainWithTeacher, "serve", [*flags, "--testing", "true", "--slurm", "false"])
    )
    assert env.seen == (False, True)
    (server,) = env.teacher_server.servers
    assert (server.config.base_url, server.config.server_type) == ("http://127.0.0.1:2/v1", "vllm")

    monkeypatch.setattr(
        PlainWithTeacher,
        "teacher_config_init",
        classmethod(lambda cls: TEACHER.model_copy(update={"tokenizer_name": str(tiny_tokenizer_dir)})),
    )
    direct: Any = PlainWithTeacher(config_for(tiny_tokenizer_dir), [TEACHER], False, True)
    assert direct.seen == (False, True)
    assert direct.teacher_server.servers[0].config.base_url == TEACHER.base_url


def test_mixed_into_an_environment_whose_constructor_takes_two_arguments(
    tiny_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(PlainWithTeacher):
        def __init__(self, config: Any, server_configs: Any) -> None:
            super().__init__(config, server_configs, False, True)

    monkeypatch.setattr(PlainWithTeacher, "tokenizer_folder", str(tiny_tokenizer_dir))
    flags = ["--teacher.base_url", "http://127.0.0.1:2/v1", "--teacher.model_name", str(tiny_tokenizer_dir)]
    env: Any = build_env(Short, resolve(Short, "serve", flags))
    assert env.teacher_server.servers[0].config.base_url == "http://127.0.0.1:2/v1"


async def test_the_teacher_is_closed_with_the_other_servers(tiny_tokenizer_dir: Path) -> None:
    same = TEACHER.model_copy(update={"tokenizer_name": str(tiny_tokenizer_dir), "health_check": True})
    env = Distill(config_for(tiny_tokenizer_dir), [TEACHER], same)
    (server,) = env.teacher_server.servers
    server.start_watching()
    await env.close_servers()
    assert server.check_task is None


def test_teacher_section_of_flags_and_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Distill._resolve_teacher_server_configs(None, {}, {"openai.base_url": "x"}) is None
    captured: dict[str, Any] = {}
    monkeypatch.setattr(module, "resolve_openai_configs", lambda **kwargs: captured.update(kwargs) or ["resolved"])
    out = Distill._resolve_teacher_server_configs(
        TEACHER, {"teacher": {"tokenizer_name": "tok"}}, {"teacher.base_url": "http://other/v1"}
    )
    assert out == ["resolved"]
    assert captured["openai_config_dict"]["base_url"] == "http://other/v1"
    assert captured["openai_config_dict"]["tokenizer_name"] == "tok"
    assert captured["yaml_config"] == {"openai": {"tokenizer_name": "tok"}}
    assert captured["cli_passed_flags"] == {"openai.base_url": "http://other/v1"}


def test_several_teachers_from_yaml() -> None:
    servers = [{"base_url": "http://a/v1", "model_name": "m"}, {"base_url": "http://b/v1", "model_name": "m"}]
    resolved = Distill._resolve_teacher_server_configs(None, {"teacher": servers}, {})
    assert [server.base_url for server in resolved] == ["http://a/v1", "http://b/v1"]
