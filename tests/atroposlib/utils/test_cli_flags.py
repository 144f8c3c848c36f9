"""Reading flags, merging sources, hiding secrets."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from atroposlib.errors import ConfigError
from atroposlib.utils import cli


class Colour(Enum):
    RED = "red"


class Model(BaseModel):
    count: int = Field(default=3, description="how many")
    names: list[str] = Field(default_factory=list)
    api_key: str | None = None


def test_values_may_be_negative_empty_or_several():
    flags = cli.scan_flags(["--env.total_steps", "-1", "--lr=-1e-5", "--names", "a", "b", "--text=", "--bare"])
    assert flags == {"env.total_steps": ["-1"], "lr": ["-1e-5"], "names": ["a", "b"], "text": [""], "bare": []}


def test_a_word_before_the_first_flag_is_an_error():
    with pytest.raises(ConfigError, match="unexpected argument 'oops'"):
        cli.scan_flags(["oops", "--a", "1"])


def test_flags_of_the_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["env.py", "serve", "--env.x", "-1", "--a=None", "--b", "--c", "1", "2"])
    assert cli.get_double_dash_flags() == {"env.x": "-1", "a": None, "b": True, "c": ["1", "2"]}


@pytest.mark.parametrize(
    ("annotation", "raw", "value"),
    [
        (int, ["-1"], -1),
        (float, ["-1e-5"], -1e-5),
        (bool, ["false"], False),
        (bool, [], True),
        (str, ["None"], "None"),
        (str | None, ["None"], None),
        (int | None, ["null"], None),
        (int | None, ["7"], 7),
        (list[int], ["1", "2"], [1, 2]),
        (list[int], ["[1, 2]"], [1, 2]),
        (list[int], ["1,2"], [1, 2]),
        (list[str], ["one"], ["one"]),
        (list[str], [], []),
        (list[str] | None, ["None"], None),
        (dict[str, int], ["{a: 1}"], {"a": 1}),
        (Colour, ["red"], Colour.RED),
        (Literal["a", "b"], ["b"], "b"),
        (Any, ["text"], "text"),
    ],
)
def test_conversion(annotation: Any, raw: list[str], value: Any):
    assert cli.convert_flag("x", annotation, raw) == value


@pytest.mark.parametrize(
    ("annotation", "raw", "message"),
    [
        (int, ["many"], "--x many: .*integer"),
        (int, [], "--x needs a value"),
        (int, ["1", "2"], "--x takes one value, got 2"),
        (list[int], ["a"], "--x a"),
    ],
)
def test_a_wrong_value_is_named(annotation: Any, raw: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        cli.convert_flag("x", annotation, raw)


def test_later_sources_win_and_nested_mappings_merge():
    assert cli.merge_dicts({"a": 1, "b": {"c": 1, "d": 2}}, None, {"b": {"c": 9}}) == {"a": 1, "b": {"c": 9, "d": 2}}


def test_a_section_without_its_prefix():
    assert cli.extract_namespace({"env.a": 1, "openai.b": 2}, "env.") == {"a": 1}


def test_overrides_are_validated_and_secrets_stay_hidden_in_errors():
    assert cli.with_overrides(Model(), {"count": "5"}).count == 5
    with pytest.raises(ConfigError, match="count = 'x'"):
        cli.with_overrides(Model(), {"count": "x"})
    with pytest.raises(ConfigError) as caught:
        cli.with_overrides(Model(), {"api_key": ["hidden"]})
    assert "hidden" not in str(caught.value)


def test_yaml_files(tmp_path: Path):
    (tmp_path / "empty.yaml").write_text("")
    assert cli.load_yaml(str(tmp_path / "empty.yaml")) == {}
    (tmp_path / "list.yaml").write_text("- a")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        cli.load_yaml(str(tmp_path / "list.yaml"))
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        cli.load_yaml(str(tmp_path / "bad.yaml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        cli.load_yaml(str(tmp_path / "absent.yaml"))


def test_models_with_prefix_and_other_defaults():
    prefixed = cli.get_prefixed_pydantic_model(Model, "env.")
    assert list(prefixed.model_fields) == ["env.count", "env.names", "env.api_key"]
    assert prefixed().model_dump()["env.count"] == 3
    adjusted = cli.adjust_model_defaults(Model, {"count": 8})
    assert adjusted.__name__ == "ModelWithDefaults"
    assert issubclass(adjusted, Model)
    assert adjusted().model_dump()["count"] == 8
    assert adjusted.model_fields["count"].description == "how many"


def test_secrets_are_masked_at_every_depth():
    masked = cli.mask_secrets({"openai": [Model(api_key="sk-1")], "x": {"API_KEY": "sk-2", "api_key": ""}, "n": 1})
    assert masked == {
        "openai": [{"count": 3, "names": [], "api_key": "***"}],
        "x": {"API_KEY": "***", "api_key": ""},
        "n": 1,
    }


def test_a_yaml_file_that_is_not_text(tmp_path: Path):
    (tmp_path / "model.yaml").write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(ConfigError, match="not valid YAML"):
        cli.load_yaml(str(tmp_path / "model.yaml"))


def test_a_folder_that_cannot_be_made_names_the_setting(tmp_path: Path):
    assert cli.make_folder(tmp_path / "a" / "b", "--dir").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--dir: the folder .*file' cannot be made \(a file of that name exists\)"):
        cli.make_folder(tmp_path / "file", "--dir")
    with pytest.raises(ConfigError, match="Not a directory"):
        cli.make_folder(tmp_path / "file" / "below", "--dir")


@pytest.mark.parametrize(
    "url", ["nonsense", "localhost:8000", "ftp://host", "http://", "http://host:port", "http://[1"]
)
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(ConfigError, match="it must look like http://host:8000"):
        cli.check_url(url, "env.rollout_server_url")


def test_addresses_are_accepted():
    for url in ("http://127.0.0.1:0", "https://api.example.com/v1", "http://[::1]:9001/v1"):
        cli.check_url(url, "openai.base_url")
