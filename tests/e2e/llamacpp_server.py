"""llama.cpp's own HTTP server around a GGUF file, in the environment that has `xllamacpp`: prints its address, ends with its standard input."""

from __future__ import annotations

import sys

import xllamacpp  # type: ignore[import-not-found]

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.model_alias = {"smollm2"}
params.port = 0
params.n_parallel = 4
params.n_ctx = 4 * 512
params.cpuparams.n_threads = 2
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
