"""Every import path and name that public environments use, and how light the main one is."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys

import pytest

NAMES = {
    "atroposlib.envs.base": (
        "BaseEnv BaseEnvConfig EvalHandlingEnum ScoredDataGroup ScoredDataItem APIServer APIServerConfig ServerBaseline "
        "ServerManager ServerManagerConfig ReasoningConfig Item Message UUID OpenaiConfig"
    ),
    "atroposlib.envs.constants": "ENV_NAMESPACE OPENAI_NAMESPACE SERVER_MANAGER_NAMESPACE NAMESPACE_SEP",
    "atroposlib.envs.eval": "pass_at_k evaluate_log EvalBase eval_runner",
    "atroposlib.type_definitions": (
        "Content Item number UUID Message AgentStep AgentHistory Observation GameStep GameHistory EvaluationConfigGeneral "
        "EvaluationResults EvaluationMetrics EvaluationSample"
    ),
    "atroposlib.utils.cli": (
        "get_prefixed_pydantic_model merge_dicts extract_namespace adjust_model_defaults get_double_dash_flags"
    ),
    "atroposlib.utils.display": "display_metrics_table",
    "atroposlib.utils.io": "parse_http_response",
    "atroposlib.utils.metrics": "get_std_min_max_avg",
    "atroposlib.api": "app",
    "atroposlib.api.server": (
        "app MIN_ENV_WEIGHT GZipRequestMiddleware Registration RegisterEnv EnvIdentifier ScoredData Status Info"
    ),
    "atroposlib.api.utils": (
        "find_groups_summing_to_target grab_exact_from_heterogeneous_queue grab_batch_with_minimum_allocations"
    ),
    "atroposlib.envs.server_handling.server_baseline": (
        "VALID_REASONING_EFFORTS ReasoningConfig AsyncSemWithAdaptiveWeight ServerBaseline APIServerConfig APIServer"
    ),
    "atroposlib.envs.server_handling.server_manager": (
        "ServerManagerConfig ServerManager APIServer APIServerConfig ServerBaseline ReasoningConfig OpenAIServer SGLangServer "
        "VLLMServer TrlVllmServer ServerHarness ManagedServer DummyManagedServer"
    ),
    "atroposlib.envs.server_handling.openai_server": "OpenAIServer resolve_openai_configs APIServerConfig OpenaiConfig",
    "atroposlib.envs.server_handling.vllm_server": "VLLMServer resolve_openai_configs",
    "atroposlib.envs.server_handling.sglang_server": "SGLangServer resolve_openai_configs",
    "atroposlib.envs.server_handling.trl_vllm_server": "TrlVllmServer AutoTokenizer aiohttp",
    "atroposlib.envs.server_handling.server_harness": "create_chat_completion create_completion ServerHarness",
    "atroposlib.envs.server_handling.managed_server": "SequenceNode ManagedServer DummyManagedServer ManagedServerAdapter",
    "atroposlib.envs.server_handling.managed_server_proxy": (
        "create_app main ChatMessage ChatCompletionProxyRequest SessionCreateRequest SessionCreateResponse RenderResponse "
        "SessionState openai_error"
    ),
    "atroposlib.envs.server_handling.proxy_client": "ProxyManagedServer create_proxy_session",
    "atroposlib.envs.server_handling.tool_call_translator": "VLLM_AVAILABLE ToolCallTranslator",
    "atroposlib.envs.teacher_distillation_env": "TeacherDistillationConfig TeacherDistillationEnv",
    "atroposlib.envs.reward_fns": "RewardFunction registry CombinedReward",
    "atroposlib.frontend.jsonl2html": "get_score_class create_html_for_group generate_html TEMPLATE_FILE SCRIPT_DIR",
    "atroposlib.utils.advantages": (
        "allclose_to_first compute_stats compute_discounted_returns compute_grpo_process_supervision_advantages "
        "NumpyArrayLike BoolVector"
    ),
    "atroposlib.utils.best_of_n_selection": "select_best_index",
    "atroposlib.utils.force_diverse_samples": "generate_with_diverse_first_tokens",
    "atroposlib.utils.message_history_utils": "strip_thinking truncate_thinking ensure_trajectory_token_limit",
    "atroposlib.utils.tokenize_for_trainer": "UNMASKED_ROLES tokenize_for_trainer tokenize_for_trainer_dpo",
    "atroposlib.utils.tokenizers.qwen_fixed_tokenizer": "QwenFixedTokenizer",
    "atroposlib.utils.tool_call_parser": "extract_tool_call parse_tool_call",
    "atroposlib.cli.run_api": "main",
    "atroposlib.cli.sft": "main find_common_prefix register_to_api check_for_batch grab_group_data sft_data_grabber",
    "atroposlib.cli.dpo": "main find_common_prefix register_to_api check_for_batch grab_group_data dpo_data_grabber",
    "atroposlib.cli.view_run": "main",
    "atroposlib.cli.view_run_multimodal": "main",
    "atroposlib.cli.inference_node_wandb_watcher": "main",
}


@pytest.mark.parametrize("module", NAMES)
def test_module_and_names(module: str):
    loaded = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(loaded, name)] == []


def test_constants():
    from atroposlib.envs import constants

    assert (constants.ENV_NAMESPACE, constants.OPENAI_NAMESPACE) == ("env", "openai")
    assert (constants.SERVER_MANAGER_NAMESPACE, constants.NAMESPACE_SEP) == ("server", ".")


def test_the_old_and_the_new_name_of_the_server_config_are_one_class():
    from atroposlib.envs import base
    from atroposlib.envs.server_handling import openai_server

    assert base.OpenaiConfig is base.APIServerConfig is openai_server.OpenaiConfig is openai_server.APIServerConfig


def test_the_constructor_keeps_its_order():
    from atroposlib.envs.base import BaseEnv

    assert list(inspect.signature(BaseEnv.__init__).parameters) == [
        "self",
        "config",
        "server_configs",
        "slurm",
        "testing",
    ]


@pytest.mark.parametrize(
    "method",
    [
        "config_init",
        "setup",
        "get_next_item",
        "evaluate",
        "collect_trajectories",
        "collect_trajectory",
        "postprocess_histories",
        "wandb_log",
        "save_checkpoint",
        "load_checkpoint",
        "create_rollout_table",
        "add_rollouts_for_wandb",
        "cleanup",
        "cli",
        "add_train_workers",
        "env_step_checks",
        "get_server_info",
        "evaluate_log",
        "setup_wandb",
        "register_env",
        "_register_env",
        "get_status",
        "perf_stats",
        "handle_send_to_api",
        "_send_scored_data_to_api",
        "_post_json_with_compression",
        "handle_env",
        "env_manager",
        "process_manager",
        "_run_evaluate",
        "get_cli_serve_config_cls",
        "get_cli_process_config_cls",
        "get_cli_evaluate_config_cls",
        "derived_batch_size",
    ],
)
def test_every_hook_is_there(method: str):
    from atroposlib.envs.base import BaseEnv

    assert hasattr(BaseEnv, method)


HEAVY = ("torch", "openai", "wandb", "transformers", "datasets")


def loaded_after(statement: str) -> list[str]:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded: list[str] = json.loads(done.stdout)
    return loaded


def test_importing_the_environment_base_loads_nothing_heavy():
    loaded = loaded_after("import atroposlib.envs.base, atroposlib.envs.env_cli")
    assert [name for name in HEAVY if name in loaded] == []


def test_the_vocabulary_needs_only_the_standard_library():
    loaded = loaded_after("import atroposlib.type_definitions")
    assert [name for name in (*HEAVY, "pydantic", "aiohttp", "numpy") if name in loaded] == []
