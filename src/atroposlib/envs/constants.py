"""Names of the flag and YAML sections: ``--env.group_size``, ``--openai.base_url``."""

from __future__ import annotations

ENV_NAMESPACE = "env"
OPENAI_NAMESPACE = "openai"
SERVER_MANAGER_NAMESPACE = "server"
NAMESPACE_SEP = "."
