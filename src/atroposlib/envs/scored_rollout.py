"""From a recorded sequence and a score to what ``collect_trajectory`` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def scored_item(
    node: Any,
    score: float,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    reward_components: Mapping[str, float] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One scored rollout out of a node of ``ManagedServer``: exactly the tokens that were sampled, their mask and log-probs.

    Example:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(messages=messages, max_tokens=256)
            node = managed.get_state()["nodes"][0]
        return scored_item(node, score=1.0 if "4" in reply.choices[0].message.content else 0.0), []
    """
    item: dict[str, Any] = {
        "tokens": list(node.tokens),
        "masks": list(node.masked_tokens),
        "inference_logprobs": list(node.logprobs),
        "scores": float(score),
        "messages": None if messages is None else [dict(message) for message in messages],
    }
    versions = (node.metadata or {}).get("policy_versions")
    if versions:
        item["policy_versions"] = list(versions)
    if reward_components is not None:
        item["reward_components"] = dict(reward_components)
    if overrides is not None:
        item["overrides"] = dict(overrides)
    return item
