# SPDX-License-Identifier: Apache-2.0
"""The card's ceilings as measured in the same process: copy, read, L2 read, and mma.sync from registers."""

from __future__ import annotations

import ctypes
import dataclasses
import statistics
from pathlib import Path

import torch

MMA_WARPS, MMA_CHAINS, MMA_FLOP = 16, 8, 2 * 16 * 8 * 16


@dataclasses.dataclass(frozen=True)
class Ceilings:
    copy_gbps: float  # bytes read plus bytes written
    read_gbps: float | None = None
    l2_read_gbps: float | None = None
    mma_tflops: float | None = None
    note: str | None = None


def _timed_ms(work, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def copy_gbps(size: int = 4 << 30) -> float:
    src = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    dst = torch.empty_like(src)
    return 2 * size / _timed_ms(lambda: dst.copy_(src)) * 1e-6


def measure(native: Path) -> Ceilings:
    copy = copy_gbps()
    library = native / "libprobes.so"
    if not library.is_file():
        return Ceilings(
            copy, note=f"no {library.name} in {native}: run build_native.py; read, L2 and MMA rates not measured"
        )
    lib = ctypes.CDLL(str(library))
    pointer = ctypes.c_void_p
    lib.probe_mma.argtypes = [ctypes.c_int, ctypes.c_int, pointer, pointer]
    lib.probe_read.argtypes = [ctypes.c_int, pointer, ctypes.c_int64, ctypes.c_int, pointer, pointer]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    sink = torch.zeros(4 * sms, dtype=torch.int32, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream

    def checked(code: int) -> None:
        if code:
            raise RuntimeError(f"probe: CUDA error {code}")

    iterations = 40000  # about 50 ms: long enough for the clock that real work holds
    ms = _timed_ms(lambda: checked(lib.probe_mma(sms, iterations, sink.data_ptr(), stream)), repeats=5)
    mma = sms * MMA_WARPS * iterations * MMA_CHAINS * MMA_FLOP / ms * 1e-9

    blocks = 4 * sms
    stride = blocks * 512 * 4  # 16-byte words that one trip of all threads reads

    def read(total: int, passes: int) -> float:
        count = total // 16 // stride * stride
        data = torch.empty(count * 4, dtype=torch.int32, device="cuda").random_()
        return (
            passes
            * count
            * 16
            / _timed_ms(
                lambda: checked(lib.probe_read(blocks, data.data_ptr(), count, passes, sink.data_ptr(), stream))
            )
            * 1e-6
        )

    return Ceilings(copy, read_gbps=read(4 << 30, 1), l2_read_gbps=read(20 << 20, 60), mma_tflops=mma)
