from dataclasses import dataclass, field


@dataclass
class ClientConfig:
    api_base_url: str
    api_key_var: str
    extra_headers_from_state: dict = field(default_factory=dict)
    max_retries: int = 10
