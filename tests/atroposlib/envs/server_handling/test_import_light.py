"""Importing server handling loads none of the heavy packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("openai", "transformers", "torch", "wandb", "datasets", "aiohttp", "fastapi", "vllm")


@pytest.mark.parametrize(
    "module", ["server_manager", "server_baseline", "openai_server", "trl_vllm_server", "managed_server"]
)
def test_heavy_packages_stay_out(module: str) -> None:
    code = (
        f"import sys, atroposlib.envs.server_handling.{module} as m; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert shown == "[]"


def test_names_of_the_package_map_exist() -> None:
    import importlib

    names = {
        "server_baseline": "VALID_REASONING_EFFORTS ReasoningConfig AsyncSemWithAdaptiveWeight ServerBaseline APIServerConfig APIServer",
        "server_manager": "ServerManagerConfig ServerManager APIServer APIServerConfig ServerBaseline ReasoningConfig OpenAIServer "
        "SGLangServer VLLMServer TrlVllmServer ServerHarness ManagedServer DummyManagedServer",
        "openai_server": "OpenAIServer resolve_openai_configs APIServerConfig OpenaiConfig",
        "vllm_server": "VLLMServer resolve_openai_configs",
        "sglang_server": "SGLangServer resolve_openai_configs",
        "trl_vllm_server": "TrlVllmServer AutoTokenizer aiohttp",
        "server_harness": "create_chat_completion create_completion ServerHarness",
        "managed_server": "SequenceNode ManagedServer DummyManagedServer ManagedServerAdapter",
        "managed_server_proxy": "create_app main ChatMessage ChatCompletionProxyRequest SessionCreateRequest SessionCreateResponse "
        "RenderResponse SessionState openai_error",
        "proxy_client": "ProxyManagedServer create_proxy_session",
        "tool_call_translator": "VLLM_AVAILABLE ToolCallTranslator",
    }
    for module, listed in names.items():
        loaded = importlib.import_module(f"atroposlib.envs.server_handling.{module}")
        assert [name for name in listed.split() if not hasattr(loaded, name)] == []
