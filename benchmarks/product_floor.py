"""What a matrix product costs at the power limit of a Hopper card, part by part, beside cuBLAS's product of the same weights.

    python benchmarks/product_floor.py

The loop of product_floor.cu multiplies 256 tokens with 14 GB of weights, about one decode step of a 7B model. Each row of the
table adds a part of the work: arithmetic on operands that stay in shared memory, then tokens from the cache, weights from
memory, results stored. Data are random normal numbers, so the bits change as in a real run. Every row is kept up for two
seconds after one of settling; the clock is the card's own choice. Needs nvcc and a card of compute capability 9.0.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

HIDDEN, INNER = 3584, 18944
TILE_OUTPUTS, TOKENS, MANY = 128, 256, 8192
SHARED_BYTES = 4 * (TILE_OUTPUTS + TOKENS) * 64 * 2 + 1024
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
STEPS = {
    "arithmetic": "loop: operands stay in shared memory",
    "tokens_loaded": "loop: tokens from the cache",
    "weights_loaded": "loop: weights from memory",
    "both_loaded": "loop: both",
    "stored": "loop: both, results stored",
}


class Kernels:
    """The compiled loop, launched through the driver."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        source = Path(__file__).with_suffix(".cu")
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "floor.cubin"
            arch = "-gencode=arch=compute_90a,code=sm_90a"
            subprocess.run(["nvcc", "-O3", "-cubin", arch, "-o", str(target), str(source)], check=True)
            self.module = ctypes.c_void_p()
            self._check(
                self.driver.cuModuleLoadData(ctypes.byref(self.module), target.read_bytes()), "loading the kernels"
            )

    def launcher(self, name: str, weights: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        kernel = ctypes.c_void_p()
        self._check(self.driver.cuModuleGetFunction(ctypes.byref(kernel), self.module, name.encode()), name)
        self._check(
            self.driver.cuFuncSetAttribute(kernel, MAX_DYNAMIC_SHARED, SHARED_BYTES), "asking for shared memory"
        )
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (weights, tokens, out)]
        values = [*pointers, ctypes.c_int(weights.shape[0] // TILE_OUTPUTS)]
        parameters = (ctypes.c_void_p * 4)(*[ctypes.addressof(value) for value in values])
        grid = torch.cuda.get_device_properties(0).multi_processor_count
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

        def launch() -> None:
            shape = (grid, 1, 1, 288, 1, 1, SHARED_BYTES)
            assert values  # `parameters` points to them
            self._check(self.driver.cuLaunchKernel(kernel, *shape, stream, parameters, None), name)

        return launch

    def _check(self, status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"{what} failed with CUDA status {status}")


class Meter:
    """The card's own energy counter and clock."""

    def __init__(self) -> None:
        self.nvml, self.card = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        self.nvml.nvmlInit_v2()
        self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.card))

    def joules(self) -> float:
        value = ctypes.c_ulonglong()
        self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.card, ctypes.byref(value))
        return value.value / 1000

    def megahertz(self) -> int:
        value = ctypes.c_uint()
        self.nvml.nvmlDeviceGetClockInfo(self.card, 1, ctypes.byref(value))
        return value.value


def keep_up(run: Callable[[], object], seconds: float) -> int:
    """How often `run` was done."""
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(4):
            run()
        count += 4
        torch.cuda.synchronize()
    return count


def show(name: str, meter: Meter, operations: float, run: Callable[[], object]) -> None:
    keep_up(run, 1.0)
    energy, start = meter.joules(), time.perf_counter()
    count = keep_up(run, 2.0)
    clock, seconds = meter.megahertz(), time.perf_counter() - start
    watts = (meter.joules() - energy) / seconds
    print(f"| {name} | {operations * count / seconds / 1e12:.0f} | {watts:.0f} | {clock} |", flush=True)


def main() -> None:
    torch.manual_seed(0)
    wave = torch.cuda.get_device_properties(0).multi_processor_count * TILE_OUTPUTS
    rows = 14_000_000_000 // (2 * HIDDEN) // wave * wave
    weights = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    for part in weights.split(1 << 16):
        part.normal_(std=0.02)
    tokens = torch.randn(MANY, HIDDEN, device="cuda").bfloat16()
    out = torch.empty(MANY, INNER, dtype=torch.bfloat16, device="cuda")
    kernels, meter = Kernels(), Meter()
    print("| | TFLOP/s | W | MHz |\n|---|---|---|---|")
    for name, words in STEPS.items():
        show(words, meter, 2.0 * TOKENS * rows * HIDDEN, kernels.launcher(name, weights, tokens, out))
    matrices = weights[: rows // INNER * INNER].view(-1, INNER, HIDDEN)
    for count in (TOKENS, MANY):
        graph = torch.cuda.CUDAGraph()  # without the gaps of launches one by one
        torch.mm(tokens[:count], matrices[0].t(), out=out[:count])
        with torch.cuda.graph(graph):
            for matrix in matrices:
                torch.mm(tokens[:count], matrix.t(), out=out[:count])
        show(f"cuBLAS, {count} tokens", meter, 2.0 * count * matrices.numel(), graph.replay)


if __name__ == "__main__":
    main()
