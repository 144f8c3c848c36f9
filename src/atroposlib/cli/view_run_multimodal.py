"""``view-run-multimodal``: as ``view-run``, with the pictures of the group."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from atroposlib.cli.view_run import run_viewer
from atroposlib.utils.closed_pipe import ends_with_its_reader

DEFAULT_MULTIMODAL_TOKENIZER = "Qwen/Qwen2-VL-2B-Instruct"


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``view-run-multimodal``."""
    return run_viewer(argv, prog="view-run-multimodal", tokenizer=DEFAULT_MULTIMODAL_TOKENIZER, show_images=True)


if __name__ == "__main__":
    sys.exit(main())
