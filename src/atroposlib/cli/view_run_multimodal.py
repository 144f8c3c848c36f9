"""``view-run-multimodal``: as ``view-run``, with the pictures of the group."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from atroposlib.cli.view_run import run_viewer

DEFAULT_MULTIMODAL_TOKENIZER = "Qwen/Qwen2-VL-2B-Instruct"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``view-run-multimodal``."""
    return run_viewer(argv, prog="view-run-multimodal", tokenizer=DEFAULT_MULTIMODAL_TOKENIZER, show_images=True)


if __name__ == "__main__":
    sys.exit(main())
