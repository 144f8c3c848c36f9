"""What environments of other versions ask of the base class."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.testing.harness_server import HarnessServer


class Settings(BaseEnvConfig):
    colour: str = "green"


class Plain(BaseEnv):
    async def get_next_item(self) -> Any:
        return None

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return None


class WithClassMethod(Plain):
    @classmethod
    def config_cls(cls) -> type:
        return Settings

    async def setup(self) -> None:
        await super().setup()
        self.is_set_up = True


class WithBoth(WithClassMethod):
    class Other(BaseEnvConfig):
        colour: str = "blue"

    env_config_cls = Other


class OwnClient(Plain):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.client = "mine"


def made(env_cls: type[BaseEnv], tokenizer: Path, url: str = "http://127.0.0.1:9/v1") -> Any:
    config = env_cls.config_init()[0].model_copy(update={"tokenizer_name": str(tokenizer), "use_wandb": False})
    return env_cls(config, [APIServerConfig(model_name="m", base_url=url, api_key="x", server_type="openai")])


def test_config_cls_names_the_config_where_env_config_cls_does_not() -> None:
    assert WithClassMethod.config_init()[0].colour == "green"
    assert WithBoth.config_init()[0].colour == "blue"
    assert type(Plain.config_init()[0]) is BaseEnvConfig


def test_a_setup_of_its_own_may_call_that_of_the_base(tiny_tokenizer_dir: Path) -> None:
    env = made(WithClassMethod, tiny_tokenizer_dir)
    asyncio.run(env.setup())
    assert env.is_set_up
    with pytest.raises(NotImplementedError, match=r"Plain must define setup\(\)"):
        asyncio.run(made(Plain, tiny_tokenizer_dir).setup())


def test_client_asks_the_servers(tiny_tokenizer_dir: Path, tiny_tokenizer: Any) -> None:
    with HarnessServer(tokenizer=tiny_tokenizer, reply=lambda prompt, index: "hello") as server:
        env = made(Plain, tiny_tokenizer_dir, server.base_url)
        assert [config.model_name for config in env.server_configs] == ["m"]

        async def ask() -> tuple[str, str]:
            chat = await env.client.chat.completions.create(
                model="another", messages=[{"role": "user", "content": "hi"}], max_tokens=8
            )
            text = await env.client.completions.create(prompt="hi", max_tokens=8)
            await env.close_servers()
            return chat.choices[0].message.content, text.choices[0].text

        assert asyncio.run(ask()) == ("hello", "hello")


def test_a_client_of_its_own_stays(tiny_tokenizer_dir: Path) -> None:
    assert made(OwnClient, tiny_tokenizer_dir).client == "mine"
