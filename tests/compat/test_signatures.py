"""Parameter names and their order: a keyword that worked in atroposlib 0.4.0 works here."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

SIGNATURES = {  # "path parameter parameter ..." by module
    "atroposlib.api.server": [
        "GZipRequestMiddleware.__init__ app",
    ],
    "atroposlib.api.utils": [
        "find_groups_summing_to_target buffer target_size",
        "grab_batch_with_minimum_allocations queue batch_size env_configs",
        "grab_exact_from_heterogeneous_queue queue batch_size",
    ],
    "atroposlib.envs.base": [
        "BaseEnv.__init__ config server_configs slurm testing",
        "BaseEnv.add_rollouts_for_wandb scored_data item",
        "BaseEnv.collect_trajectories item",
        "BaseEnv.collect_trajectory item",
        "BaseEnv.create_rollout_table wandb_metrics",
        "BaseEnv.evaluate_log metrics task_name model_name start_time end_time generation_parameters samples verbose",
        "BaseEnv.handle_env item_uuid",
        "BaseEnv.handle_send_to_api scored_data item do_send_to_api abort_on_any_max_length_exceeded",
        "BaseEnv.perf_stats metrics_dict",
        "BaseEnv.postprocess_histories trajectories",
        "BaseEnv.save_checkpoint step data",
        "BaseEnv.server_cls config reasoning_config",
        "BaseEnv.wandb_log wandb_metrics",
    ],
    "atroposlib.envs.eval": [
        "EvalBase.__init__ pass_at_n pass_at_n_samples",
        "EvalBase.chat_completion server messages",
        "EvalBase.run_item server data_item",
        "eval_runner eval_env",
        "evaluate_log metrics eval_dir task_name model_name start_time end_time generation_parameters samples verbose",
        "pass_at_k m c k",
    ],
    "atroposlib.envs.reward_fns.accuracy_reward": [
        "AccuracyReward.__init__ tolerance split_on_think_tag max_boxed_threshold weight",
        "AccuracyReward.compute completions solution ground_truth",
        "accuracy_reward completions solution ground_truth",
    ],
    "atroposlib.envs.reward_fns.cascading_r1_math_reward": [
        "cascading_r1_math_reward completions solution",
    ],
    "atroposlib.envs.reward_fns.chandas_meter_reward": [
        "ChandasMeterReward.__init__ meter weight",
        "iast_to_slp1 text",
    ],
    "atroposlib.envs.reward_fns.combined_reward": [
        "CombinedReward.__init__ rewards normalization weight",
    ],
    "atroposlib.envs.reward_fns.cosine_scaled_reward": [
        "CosineScaledReward.__init__ model_name scale_factor min_reward max_reward default_reward weight",
        "CosineScaledReward.compute completions solution",
        "cosine_scaled_reward completions solution",
    ],
    "atroposlib.envs.reward_fns.crossword_format_reward": [
        "CrosswordFormatReward.__init__ format_patterns reward_value penalize_invalid_chars valid_chars weight",
        "crossword_format_reward completions",
    ],
    "atroposlib.envs.reward_fns.format_reward": [
        "FormatReward.__init__ preferred_tags require_all_tags case_sensitive weight",
        "format_reward completions preferred_tags",
    ],
    "atroposlib.envs.reward_fns.r1_reward": [
        "AccuracyXReward.__init__ exact_match case_sensitive reward_value weight",
        "AccuracyXReward.compute completions solution",
        "FormatReasoningReward.__init__ reward_value require_thinking require_response allow_multiple_thinking weight",
        "R1Reward.__init__ format_weight accuracy_weight weight",
        "R1Reward.compute completions solution",
        "r1_reward completions solution",
    ],
    "atroposlib.envs.reward_fns.reasoning_steps_reward": [
        "ReasoningStepsReward.__init__ min_words min_steps base_score pattern_weights weight",
        "reasoning_steps_reward completions",
    ],
    "atroposlib.envs.reward_fns.registry": [
        "LegacyFunctionWrapper.__init__ func weight",
        "RewardRegistry.create name_or_config",
        "RewardRegistry.get name",
        "RewardRegistry.load_required_functions config",
        "RewardRegistry.register name",
        "RewardRegistry.register_function name function",
    ],
    "atroposlib.envs.reward_fns.repetition_penalty_reward": [
        (
            "RepetitionPenaltyReward.__init__ threshold min_words min_sentences short_text_penalty "
            "paragraph_repetition_base_penalty component_weights stopwords weight"
        ),
        "repetition_penalty_reward completions threshold",
    ],
    "atroposlib.envs.reward_fns.reward_function": [
        "RewardFunction.__init__ weight name",
        "RewardFunction.compute completions",
        "RewardFunction.get_content completion",
        "RewardFunction.log_metrics raw_rewards weighted_rewards",
        "RewardFunction.set_wandb_logger logger",
    ],
    "atroposlib.envs.server_handling.managed_server": [
        "DummyManagedServer.__init__ server tokenizer track_tree",
        "ManagedServer.__init__ server tokenizer track_tree tool_parser preserve_think_blocks",
        "ManagedServerAdapter.__init__ managed_server base_url",
        "ManagedServerAdapter.post path body cast_to",
    ],
    "atroposlib.envs.server_handling.managed_server_proxy": [
        "create_app server_manager tokenizer model_name",
        "openai_error status_code message error_type",
    ],
    "atroposlib.envs.server_handling.openai_server": [
        "resolve_openai_configs default_server_configs openai_config_dict yaml_config cli_passed_flags logger",
    ],
    "atroposlib.envs.server_handling.proxy_client": [
        "ProxyManagedServer.__init__ proxy_url session_uuid model_name base_url",
        "create_proxy_session proxy_url base_url tool_parser track_tree model_name",
    ],
    "atroposlib.envs.server_handling.server_baseline": [
        "APIServer.__init__ config reasoning_config",
        "APIServer.check_server_status_task chat_completion",
        "APIServer.update_weight weight",
        "APIServer.wandb_metrics metrics_dict server_name",
        "AsyncSemWithAdaptiveWeight.__init__ value",
        "AsyncSemWithAdaptiveWeight.update_weight weight",
        "ReasoningConfig.__init__ enabled effort max_tokens",
        "ReasoningConfig.build_extra_body base_url use_max_tokens",
        "ReasoningConfig.from_env_config env_config",
    ],
    "atroposlib.envs.server_handling.server_harness": [
        "ServerHarness.set_desired_completion input_message completion",
        "ServerHarness.set_desired_response input_message desired_response",
        (
            "ServerHarness.set_tokens_and_logprobs_response prompt prompt_tokens output_tokens_list "
            "output_logprobs_list finish_reasons"
        ),
        "ServerHarness.update_weight weight",
        "create_chat_completion resp n finish_reason",
        "create_completion resp n finish_reason",
    ],
    "atroposlib.envs.server_handling.server_manager": [
        (
            "ServerManager.__init__ configs server_class slurm testing max_n_completions reasoning_config proxy_url "
            "use_proxy tool_parser"
        ),
        "ServerManager.managed_server tokenizer base_url preserve_think_blocks",
        "ServerManager.update_weight weight",
    ],
    "atroposlib.envs.server_handling.sglang_server": [
        "resolve_openai_configs default_server_configs openai_config_dict yaml_config cli_passed_flags logger",
    ],
    "atroposlib.envs.server_handling.tool_call_translator": [
        "ToolCallTranslator.__init__ tokenizer parser_name",
        "ToolCallTranslator.convert_messages_for_template messages",
        "ToolCallTranslator.decode_with_tool_awareness token_ids has_tools",
        "ToolCallTranslator.parse_model_output raw_text tool_choice tools",
        "ToolCallTranslator.reconstruct_raw_text_from_tool_calls tool_calls",
    ],
    "atroposlib.envs.server_handling.vllm_server": [
        "resolve_openai_configs default_server_configs openai_config_dict yaml_config cli_passed_flags logger",
    ],
    "atroposlib.frontend.jsonl2html": [
        "create_html_for_group group_data index",
        "generate_html input_path output_path",
        "get_score_class score",
    ],
    "atroposlib.utils.advantages": [
        "allclose_to_first values rtol atol equal_nan return_vector",
        "compute_discounted_returns rewards gamma",
        "compute_grpo_process_supervision_advantages rewards gamma std_tol",
        "compute_stats data",
    ],
    "atroposlib.utils.best_of_n_selection": [
        "select_best_index primary_scores secondary_scores primary_higher_is_better secondary_lower_is_better",
    ],
    "atroposlib.utils.cli": [
        "adjust_model_defaults model_class defaults",
        "extract_namespace model prefix",
        "get_prefixed_pydantic_model base_model prefix",
        "merge_dicts dicts",
    ],
    "atroposlib.utils.display": [
        "display_metrics_table task_name metrics start_time end_time",
    ],
    "atroposlib.utils.force_diverse_samples": [
        "generate_with_diverse_first_tokens messages prefill n max_tokens temperature",
    ],
    "atroposlib.utils.io": [
        "parse_http_response resp logger",
    ],
    "atroposlib.utils.message_history_utils": [
        "ensure_trajectory_token_limit trajectory tokenizer max_trajectory_tokens",
        "strip_thinking response_text",
        "truncate_thinking response_text tokenizer max_think_tokens",
    ],
    "atroposlib.utils.metrics": [
        "get_std_min_max_avg name data metrics_dict",
    ],
    "atroposlib.utils.tokenize_for_trainer": [
        "tokenize_for_trainer tokenizer chat include_messages train_on_all_assistant_turns finish_reason",
    ],
    "atroposlib.utils.tokenizers.qwen_fixed_tokenizer": [
        "QwenFixedTokenizer.__init__ model_name_or_path",
        (
            "QwenFixedTokenizer.apply_chat_template conversation tools tokenize padding truncation max_length "
            "return_tensors return_dict add_generation_prompt"
        ),
    ],
    "atroposlib.utils.tool_call_parser": [
        "extract_tool_call text preferred_tags",
        "parse_tool_call response available_tools preferred_tags",
    ],
}
CASES = [(module, signature) for module, signatures in SIGNATURES.items() for signature in signatures]


def parameters(module: str, path: str) -> list[inspect.Parameter]:
    target: Any = importlib.import_module(module)
    for name in path.split("."):
        target = getattr(target, name)
    found = inspect.signature(target).parameters.values()
    return [parameter for parameter in found if parameter.name not in ("self", "cls")]


@pytest.mark.parametrize(("module", "signature"), CASES, ids=[signature.split()[0] for _, signature in CASES])
def test_old_keywords_are_taken_in_the_old_order(module: str, signature: str):
    path, *wanted = signature.split()
    ours = parameters(module, path)
    positional = [p.name for p in ours if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional[: len(wanted)] == wanted[: len(positional)]
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in ours):
        assert [name for name in wanted if name not in {p.name for p in ours}] == []
