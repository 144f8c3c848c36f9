"""A server with vLLM's routes and a real tiny model behind them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class VLLMLikeServer:
    """vLLM's completion and reload routes over the embedded engine; ``stale_head`` reproduces the bug of a known build."""

    def __init__(self, model: Any, *, port: int = 0, stale_head: bool = False, raw_logprobs: bool = False) -> None:
        from atlaslib.engine import Engine

        self.model, self.stale_head, self.raw_logprobs = model, stale_head, raw_logprobs
        self.engine = Engine(model)
        self.requests: list[dict[str, Any]] = []
        self.weights_name = "default"
        self.forgets_after: int | None = None
        """requests after which it behaves like one that was started again"""
        self.reloads: list[str] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(outer.state(self.path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                with outer._lock:
                    self._reply(outer.answer(self.path, json.loads(body) if body else {}))

            def _reply(self, value: dict[str, Any]) -> None:
                data = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def state(self, path: str) -> dict[str, Any]:
        if path == "/weight_info":
            return {"weight_version": self.weights_name}
        return {"data": [{"id": "served", "max_model_len": 200}]} if path == "/v1/models" else {}

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/update_weight_version":
            self.weights_name = body["new_version"]
        if path == "/collective_rpc":
            self.reloads.append(body["kwargs"]["weights_path"])
            self._reload(Path(body["kwargs"]["weights_path"]))
        return self._complete(body) if path == "/v1/completions" else {}

    def _reload(self, folder: Path) -> None:
        from safetensors.torch import load_file

        state = load_file(folder / "model.safetensors")
        if self.stale_head:
            state.pop("lm_head.weight")
        with self.engine.updating():
            self.model.load_state_dict(state, strict=False)

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        from atlaslib.engine import SamplingParams

        self.requests.append(body)
        if len(self.requests) == self.forgets_after:
            self.weights_name = "default"
        params = SamplingParams(
            n=body["n"],
            seed=body["seed"],
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=max(body["top_k"], 0),
            stop_token_ids=body["stop_token_ids"],
        )
        choices = []
        for completion in self.engine.generate([body["prompt"]], params)[0]:
            values = completion.raw_logprobs if self.raw_logprobs else completion.temperature_logprobs
            choices.append(
                {
                    "token_ids": completion.token_ids,
                    "logprobs": {"token_logprobs": values},
                    "finish_reason": completion.finish_reason,
                }
            )
        return {"choices": choices}

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
