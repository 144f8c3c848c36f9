"""A real Hugging Face tokenizer made in code: one id per byte plus the ChatML control tokens, no download.

Every text round-trips, ids are the same on every machine, and the chat template is append-only, so it
serves tests, examples and the from-scratch model of the quickstart alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}{{ part['text'] if part['type'] == 'text' else '' }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")


def build_tiny_tokenizer() -> Any:
    """A ``PreTrainedTokenizerFast`` with 256 byte ids and three control tokens (259 ids in all)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*CONTROL_TOKENS, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def make_tiny_tokenizer(folder: str | Path) -> Path:
    """Save the tiny tokenizer under ``folder`` so that ``AutoTokenizer.from_pretrained(folder)`` loads it."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    build_tiny_tokenizer().save_pretrained(str(path))
    return path
