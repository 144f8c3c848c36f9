"""Prompts: rows of a data set to token ids, and which rows a step uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atlaslib.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One prompt, ready to be sampled."""

    row: dict[str, Any]
    """the row of the data set, with all its columns"""
    token_ids: list[int]
    """exactly what the sampler gets and the trainer trains on"""
    text: str
    assistant_prefix: str = ""
    """text of a final assistant turn that the completion continues"""

    @property
    def is_chat(self) -> bool:
        return isinstance(self.row["prompt"], list)


class PromptEncoder:
    """Rows to prompts with one tokenizer, one chat template and one length limit."""

    def __init__(
        self, tokenizer: Any, *, max_length: int | None, template_kwargs: dict[str, Any] | None = None
    ) -> None:
        self._tokenizer, self._max_length, self._template_kwargs = tokenizer, max_length, template_kwargs or {}

    def encode(self, row: dict[str, Any]) -> Prompt:
        """Chat prompts through the chat template with the generation prompt; long prompts lose their beginning."""
        if "prompt" not in row:
            raise ConfigError(f"a row of the data set has no 'prompt' column; its columns are {sorted(row)}")
        prompt = row["prompt"]
        prefix = ""
        if isinstance(prompt, str):
            text, special = prompt, True
        elif isinstance(prompt, list):
            text, prefix = self._render(prompt)
            special = False
        else:
            raise ConfigError(f"a prompt must be text or a list of messages, not {type(prompt).__name__}")
        ids = self._encode(text, special)
        if not ids:
            raise ConfigError(f"the prompt {prompt!r} has no tokens")
        if self._max_length is not None:
            ids = ids[-self._max_length :]
        return Prompt(row=row, token_ids=ids, text=text, assistant_prefix=prefix)

    def _encode(self, text: str, special: bool) -> list[int]:
        ids = list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
        eos = self._tokenizer.eos_token_id
        if special and len(ids) > 1 and ids[-1] == eos and not text.endswith(str(self._tokenizer.eos_token)):
            ids.pop()  # some tokenizers close plain text with EOS; a prompt is not finished
        return ids

    def _render(self, messages: list[dict[str, Any]]) -> tuple[str, str]:
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise ConfigError(
                "the prompts are chats but the tokenizer has no chat template; give text prompts or set tokenizer.chat_template"
            )
        continues = bool(messages) and messages[-1].get("role") == "assistant"
        text = self._tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **self._template_kwargs,
        )
        return str(text), str(messages[-1]["content"]) if continues else ""


class PromptOrder:
    """Which rows a generation round uses: a permutation per epoch, cut into rounds; the same for every process.

    A partial last round is left out; a data set smaller than one round is used several times in it.
    """

    def __init__(
        self, *, num_rows: int, prompts_per_round: int, seed: int, artificial_epochs: int = 1, shuffle: bool = True
    ) -> None:
        if num_rows < 1:
            raise ConfigError("the training data set is empty")
        self._num_rows, self._per_round, self._seed = num_rows, prompts_per_round, seed
        self._repeats = max(artificial_epochs, 1)
        self._shuffle = shuffle
        self._cache: tuple[int, list[int]] = (-1, [])

    @property
    def rounds_per_epoch(self) -> int:
        return max((self._num_rows * self._repeats) // self._per_round, 1)

    def rows(self, round_index: int, refill: int = 0) -> list[int]:
        """Row numbers of a round, counted over all epochs; ``refill`` > 0 gives further rows for the same round."""
        epoch, place = divmod(round_index, self.rounds_per_epoch)
        order = self._order(epoch)
        start = place * self._per_round + refill * self._per_round * 7919
        return [order[(start + i) % len(order)] for i in range(self._per_round)]

    def _order(self, epoch: int) -> list[int]:
        if self._cache[0] != epoch:
            order: list[int] = []
            for repeat in range(self._repeats):
                if self._shuffle:
                    generator = torch.Generator().manual_seed(self._seed + 1_000_003 * (epoch * self._repeats + repeat))
                    order += torch.randperm(self._num_rows, generator=generator).tolist()
                else:
                    order += range(self._num_rows)
            self._cache = (epoch, order)
        return self._cache[1]


def as_rows(dataset: Any) -> Sequence[dict[str, Any]]:
    """Anything with rows: a list of dicts, a ``datasets.Dataset``, or something iterable (read whole)."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return dataset  # type: ignore[no-any-return]
    return list(dataset)


def derive_seed(*parts: int) -> int:
    """One 63-bit seed from several numbers; near inputs give unrelated outputs (splitmix64)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
