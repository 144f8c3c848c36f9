"""``load_tokenizer``: a Hugging Face tokenizer whose ``apply_chat_template`` returns a plain list of ids.

Environments call ``tokenizer.apply_chat_template(messages)`` and expect a list. Newer transformers return a
``BatchEncoding`` there; the tokenizer made here keeps the list, on old and new versions alike. ``return_dict``
and ``return_tensors`` passed explicitly do what they always did. Calls that newer versions dropped (``encode_plus``,
``batch_encode_plus``, ``additional_special_tokens``) stay.
"""

from __future__ import annotations

from typing import Any

from atroposlib.errors import ConfigError

_subclasses: dict[type, type] = {}


class ListChatTemplate:
    """Mixed in before the tokenizer's own class by ``with_list_chat_template``."""

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        """As the tokenizer's own, with ``return_dict=False`` unless asked otherwise."""
        if not kwargs.get("return_assistant_tokens_mask"):
            kwargs.setdefault("return_dict", False)
        return super().apply_chat_template(conversation, *args, **kwargs)  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        """Names that older versions have; asked for only where the tokenizer's own class lacks them."""
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name in ("encode_plus", "batch_encode_plus"):
                return self.__call__  # type: ignore[operator]
            if name == "additional_special_tokens":
                return list(super().__getattr__("extra_special_tokens"))  # type: ignore[misc]
            if name == "additional_special_tokens_ids":
                return [self.convert_tokens_to_ids(token) for token in self.additional_special_tokens]
            raise

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as the tokenizer's own class; the mixin is added again on loading."""
        state = object.__reduce_ex__(self, 2)[2]
        return _rebuild, (type(self).__mro__[2], state)


def _rebuild(tokenizer_class: type, state: Any) -> Any:
    tokenizer: Any = object.__new__(tokenizer_class)
    restore = getattr(tokenizer, "__setstate__", None)
    if restore is not None:
        restore(state)
    else:
        tokenizer.__dict__.update(state)
    return with_list_chat_template(tokenizer)


def with_list_chat_template(tokenizer: Any) -> Any:
    """Give ``tokenizer`` the list-returning ``apply_chat_template``, in place; returns it."""
    own = type(tokenizer)
    if issubclass(own, ListChatTemplate) or not hasattr(tokenizer, "apply_chat_template"):
        return tokenizer
    if own not in _subclasses:
        # The same name, so that saving the tokenizer records the class everybody knows.
        _subclasses[own] = type(
            own.__name__, (ListChatTemplate, own), {"__module__": own.__module__, "__doc__": own.__doc__}
        )
    tokenizer.__class__ = _subclasses[own]
    return tokenizer


def load_tokenizer(name: str, **kwargs: Any) -> Any:
    """Load the tokenizer called ``name`` (hub id or local folder).

    Example: ``load_tokenizer("Qwen/Qwen3-0.6B").apply_chat_template([{"role": "user", "content": "hi"}])``
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the tokenizer {name!r} could not be loaded ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}); "
            "give a hub id that can be reached or a folder with tokenizer files as tokenizer_name"
        ) from error
    return with_list_chat_template(tokenizer)
