"""A Qwen tokenizer whose chat template only ever appends.

The stock template drops the thinking of earlier turns and adds text the model never saw; a conversation that grows
then changes its own past, and recorded tokens no longer match. This one renders every message as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE_FILE = Path(__file__).with_name("qwen_chat_template.jinja")


class QwenFixedTokenizer:
    """``AutoTokenizer.from_pretrained(name, **kwargs)`` with the append-only template; everything else is passed on.

    Example: ``QwenFixedTokenizer("Qwen/Qwen3-4B").apply_chat_template(chat, tokenize=True)`` gives a plain list of ids.
    """

    def __init__(self, model_name_or_path: str, **kwargs: Any) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **kwargs)
        self.tokenizer.chat_template = TEMPLATE_FILE.read_text(encoding="utf-8")

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """As in transformers, but ids come as a plain list unless ``return_dict=True`` asks for more."""
        kwargs.setdefault("return_dict", False)
        return self.tokenizer.apply_chat_template(conversation, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # not set yet: unpickling or a failed constructor
            raise AttributeError(name)
        return getattr(self.tokenizer, name)
