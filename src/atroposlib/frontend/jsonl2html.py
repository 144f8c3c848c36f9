"""Recorded groups (JSON lines) as one static page.

Groups are read and written one at a time, so a file of any size works. Everything a model or a data set said is text:
it is escaped, and only ``data:image/...`` pictures are shown as pictures.
"""

from __future__ import annotations

import html
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SCRIPT_DIR = Path(__file__).resolve().parent
TEMPLATE_FILE = SCRIPT_DIR / "template.html"
"""The page around the groups; ``{title}`` and ``{groups_html}`` are filled in."""

_IMAGE_URL = re.compile(r"data:image/(?:png|jpeg|jpg|gif|webp);base64,[A-Za-z0-9+/=\s]+")


def get_score_class(score: Any) -> str:
    """The CSS class that colours a score."""
    try:
        value = float(score)
    except (TypeError, ValueError):
        return "reward-zero"
    return "reward-positive" if value > 0 else "reward-negative" if value < 0 else "reward-zero"


def create_html_for_group(group_data: Mapping[str, Any], index: int) -> str:
    """One group: its rollouts with their scores. Extra messages or scores are left out; "" when nothing remains."""
    messages, scores = group_data.get("messages") or [], group_data.get("scores") or []
    rollouts = list(zip(messages, scores, strict=False))
    if len(messages) != len(scores):
        logger.warning(
            "group %d has %d messages and %d scores; showing %d", index, len(messages), len(scores), len(rollouts)
        )
    if not rollouts:
        return ""
    numbers = [float(score) for _, score in rollouts if isinstance(score, int | float)]
    mean = f", mean score {sum(numbers) / len(numbers):.3g}" if numbers else ""
    items = "\n".join(_rollout(number, message, score) for number, (message, score) in enumerate(rollouts, start=1))
    heading = f"Group {index + 1}: {len(rollouts)} rollouts{mean}"
    return f'<details class="group"{" open" if index == 0 else ""}><summary>{html.escape(heading)}</summary>\n{items}\n</details>\n'


def _rollout(number: int, message: Any, score: Any) -> str:
    label = f'Rollout {number} <span class="score {get_score_class(score)}">{html.escape(str(score))}</span>'
    return f'<details class="rollout" open><summary>{label}</summary><div class="content">{render_messages(message)}</div></details>'


def render_messages(messages: Any) -> str:
    """A conversation, a text or anything else as safe HTML."""
    if isinstance(messages, list) and messages and all(isinstance(one, Mapping) and "role" in one for one in messages):
        return "\n".join(_message(one) for one in messages)
    return f'<div class="text">{html.escape(messages if isinstance(messages, str) else str(messages))}</div>'


def _message(message: Mapping[str, Any]) -> str:
    role = str(message.get("role", "")).capitalize()
    body = _content(message.get("content"))
    if calls := message.get("tool_calls"):
        body += (
            f'<div class="text tool">{html.escape(json.dumps(calls, ensure_ascii=False, indent=1, default=str))}</div>'
        )
    return f'<div class="message"><strong>{html.escape(role)}</strong>{body}</div>'


def _content(content: Any) -> str:
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    return "".join(_part(part) for part in parts)


def _part(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") in ("image_url", "image"):
        source = part.get("image_url", part.get("image"))
        return render_image(source.get("url") if isinstance(source, Mapping) else source)
    text = (
        part.get("text", json.dumps(part, default=str)) if isinstance(part, Mapping) else "" if part is None else part
    )
    return f'<div class="text">{html.escape(str(text))}</div>'


def render_image(source: Any) -> str:
    """A picture for a data URL or bare base64; anything else is shown as the text it is (a page loads nothing from outside)."""
    text = str(source or "")
    if re.fullmatch(r"[A-Za-z0-9+/=\s]{64,}", text):
        text = f"data:image/png;base64,{text}"
    if _IMAGE_URL.fullmatch(text):
        return f'<img alt="image" src="{html.escape(text)}">'
    return f'<div class="text">[image: {html.escape(text[:200])}]</div>'


def generate_html(input_path: str | Path, output_path: str | Path | None = None) -> Path:
    """Write the page for a JSONL file (default: same name, ``.html``) and return its path.

    A missing input file ends the program with exit code 1; a line that is not a JSON object is skipped with a warning.
    """
    source = Path(input_path)
    if not source.is_file():
        logger.error("no such file: %s", source)
        sys.exit(1)
    target = Path(output_path) if output_path else source.with_suffix(".html")
    head, _, tail = TEMPLATE_FILE.read_text(encoding="utf-8").partition("{groups_html}")
    title = html.escape(source.stem)
    partial = target.with_name(target.name + ".part")
    with partial.open("w", encoding="utf-8") as page:
        page.write(head.replace("{title}", title))
        for index, group in enumerate(_read_groups(source)):
            page.write(create_html_for_group(group, index))
        page.write(tail.replace("{title}", title))
    partial.replace(target)
    return target


def _read_groups(source: Path) -> Iterator[Mapping[str, Any]]:
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                group = json.loads(line)
            except ValueError as error:
                logger.warning("%s, line %d is not JSON (%s); skipped", source, number, error)
                continue
            if isinstance(group, dict):
                yield group
            else:
                logger.warning("%s, line %d is no JSON object; skipped", source, number)


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m atroposlib.frontend.jsonl2html groups.jsonl [page.html]``"""
    import argparse

    parser = argparse.ArgumentParser(prog="jsonl2html", description="Make a page from recorded groups.")
    parser.add_argument("input", help="a JSON lines file of groups")
    parser.add_argument("output", nargs="?", help="the page to write (default: the same name with .html)")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logger.info("wrote %s", generate_html(arguments.input, arguments.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
