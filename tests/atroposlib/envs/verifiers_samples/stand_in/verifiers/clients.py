import os
from types import SimpleNamespace

from openai import AsyncOpenAI


def resolve_client(config):
    api = AsyncOpenAI(
        base_url=config.api_base_url, api_key=os.environ[config.api_key_var], max_retries=config.max_retries
    )
    return SimpleNamespace(config=config, api=api)
