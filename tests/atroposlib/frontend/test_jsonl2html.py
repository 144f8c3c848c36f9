"""The page of recorded groups: every kind of message is shown, nothing a model wrote is executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.frontend.jsonl2html import TEMPLATE_FILE, create_html_for_group, generate_html, get_score_class, main

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
PIXEL = "data:image/png;base64," + "iVBORw0KGgo" * 8


def test_strings_and_conversations() -> None:
    page = create_html_for_group(
        {"messages": ["one", [{"role": "user", "content": "2+2?"}], 7], "scores": [0.5, -1, 0]}, 0
    )
    assert "one" in page
    assert "<strong>User</strong>" in page
    assert "2+2?" in page
    for expected in ('reward-positive">0.5', 'reward-negative">-1', 'reward-zero">0'):
        assert expected in page


def test_lengths_are_cut_to_the_shorter_and_nothing_is_nothing() -> None:
    page = create_html_for_group({"messages": ["Message 1", "Message 2"], "scores": [0.5]}, 3)
    assert "Message 1" in page
    assert "Message 2" not in page
    assert "Group 4" in page
    assert create_html_for_group({"messages": [], "scores": []}, 0) == ""
    assert create_html_for_group({"messages": None, "scores": None}, 0) == ""


@pytest.mark.parametrize(
    "message",
    [
        EVIL,
        [{"role": EVIL, "content": EVIL, "tool_calls": [{"function": {"name": EVIL}}]}],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": EVIL}, {"type": "image_url", "image_url": {"url": EVIL}}],
            }
        ],
        {"not": EVIL},
    ],
)
def test_a_script_tag_is_text(message: Any, tmp_path: Path) -> None:
    source = tmp_path / f"{'<b>'}.jsonl"
    source.write_text(json.dumps({"messages": [message], "scores": [EVIL]}) + "\n")
    page = generate_html(source).read_text()
    assert "&lt;script&gt;alert(1)" in page or "&lt;Script" in page or "&lt;script" in page.lower()
    body = page.replace(TEMPLATE_FILE.read_text().split("{groups_html}")[0], "")
    assert "<script" not in body.lower()
    assert "<img" not in body
    assert "onerror=alert" not in body.replace("onerror=alert(2)&gt;", "")
    assert "<title>&lt;b&gt;</title>" in page


def test_pictures_are_shown_only_from_data() -> None:
    page = create_html_for_group(
        {
            "messages": [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}]],
            "scores": [1],
        },
        0,
    )
    assert f'<img alt="image" src="{PIXEL}">' in page
    outside = create_html_for_group(
        {
            "messages": [[{"role": "user", "content": [{"type": "image", "image": "https://x.example/a.png"}]}]],
            "scores": [1],
        },
        0,
    )
    assert "<img" not in outside


def test_generate_streams_skips_bad_lines_and_names_the_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "groups.jsonl"
    good = json.dumps({"messages": ["kept {title}"], "scores": [1.0]})
    source.write_text(f"{good}\n\nnot json\n[1]\n{good}\n")
    assert generate_html(str(source)) == tmp_path / "groups.html"
    page = (tmp_path / "groups.html").read_text()
    assert page.count("kept {title}") == 2
    assert page.rstrip().endswith("</html>")
    assert "line 3" in caplog.text
    assert "line 4" in caplog.text
    assert list(tmp_path.glob("*.part")) == []
    assert main([str(source), str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").exists()


def test_missing_input_exits_with_one(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        generate_html(tmp_path / "nothing.jsonl")
    assert caught.value.code == 1


@pytest.mark.parametrize(
    ("score", "expected"),
    [(1, "reward-positive"), (0.0, "reward-zero"), (-0.1, "reward-negative"), (None, "reward-zero")],
)
def test_score_class(score: Any, expected: str) -> None:
    assert get_score_class(score) == expected
