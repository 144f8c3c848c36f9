"""What every number in ``metrics.jsonl`` means; the reference page is made from this table, and a test holds runs to it.

``{name}`` stands for the name of a reward function, a phase or a counter.
"""

from __future__ import annotations

import re

METRICS: dict[str, str] = {
    "reward": "mean total reward of the batch",
    "reward_std": "mean over groups of the standard deviation of their rewards",
    "rewards/{name}": "mean of one reward function",
    "rewards/{name}_failed": "samples on which a reward function raised",
    "completion_length": "mean completion length in tokens",
    "completions/min_length": "shortest completion",
    "completions/max_length": "longest completion",
    "completions/truncated_share": "completions cut by the length limit",
    "rollout/zero_variance_share": "groups whose rewards are all equal: they teach nothing",
    "rollout/num_set_aside": "rollouts without a reward",
    "rollout/num_groups": "groups in the batch (rollouts from environments)",
    "rollout/num_refused_stale": "samples refused because they were older than max_staleness",
    "rollout/num_refused_broken": "samples refused because their lists disagree",
    "rollout/num_unversioned": "samples that do not say which policy version made them",
    "rollout/num_ahead": "samples of policy versions this run has not reached: of an earlier run, or of steps after the checkpoint",
    "rollout/staleness_mean": "mean number of versions between sampling and training",
    "rollout/staleness_max": "the largest of them",
    "rollout/dynamic_rounds": "refills of dynamic sampling",
    "train/loss": "loss of the step",
    "train/grad_norm": "norm of the gradients before clipping",
    "train/learning_rate": "learning rate of the step",
    "train/num_samples": "samples trained",
    "train/num_tokens": "tokens of these samples, prompts included",
    "train/num_trained_tokens": "tokens that carry loss",
    "train/skipped_share": "samples that cannot change the gradient and are not computed",
    "train/row_tokens": "mean tokens of a microbatch as laid out, padding included",
    "train/tokens_per_s": "tokens of the batch divided by the time of the step",
    "train/distill_kl": "mean distillation term per token",
    "policy/ratio_mean": "mean importance ratio",
    "policy/clip_low_share": "tokens clipped below",
    "policy/clip_high_share": "tokens clipped above",
    "policy/entropy": "mean entropy of the policy at the trained tokens",
    "kl": "mean KL to the reference per token",
    "policy/logprob_mean": "mean log-prob of the trained tokens",
    "policy/mismatch_kl": "KL between sampler and trainer on the sampled tokens (k3)",
    "policy/mismatch_abs": "mean |log-prob(sampler) - log-prob(trainer)|",
    "policy/importance_weight_mean": "mean weight of the sampler correction (tis, mis)",
    "policy/importance_masked_share": "tokens masked by the sampler correction (mis)",
    "time/step_s": "seconds of the whole step",
    "time/sampling_s": "seconds sampling rollouts",
    "time/scoring_s": "seconds in reward functions",
    "time/waiting_s": "seconds waiting for rollouts",
    "time/layout_s": "seconds building microbatches",
    "time/forward_s": "seconds in forward passes",
    "time/backward_s": "seconds in backward passes",
    "time/reference_s": "seconds in the reference model",
    "time/update_s": "seconds in the optimizer, including waiting for running replies",
    "time/sync_s": "seconds bringing the weights to the sampler",
    "student_accuracy": "teacher: share of right answers with teaching",
    "baseline_accuracy": "teacher: share of right answers without",
    "accuracy_delta": "teacher: their difference",
    "improvement_rate": "teacher: wrong without, right with teaching (`_low`, `_high`: 95 % interval)",
    "improvement_rate_low": "lower end of the interval",
    "improvement_rate_high": "upper end of the interval",
    "degradation_rate": "teacher: right without, wrong with teaching (`_low`, `_high`: 95 % interval)",
    "degradation_rate_low": "lower end of the interval",
    "degradation_rate_high": "upper end of the interval",
    "teaching_length_mean": "teacher: mean length of its answer in tokens",
    "teaching_length_std": "teacher: their standard deviation",
    "student_approach_length": "teacher: mean length of the probes in tokens",
    "token_efficiency": "teacher: mean reward per 100 tokens of teaching",
}


def describe_metric(name: str) -> str | None:
    """The meaning of one metric, or None when nobody wrote it down."""
    if name in METRICS:
        return METRICS[name]
    for pattern, meaning in METRICS.items():
        if "{name}" in pattern and re.fullmatch(re.escape(pattern).replace(r"\{name\}", r".+"), name):
            return meaning
    return None
