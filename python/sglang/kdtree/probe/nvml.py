# SPDX-License-Identifier: Apache-2.0
"""GPU counters over NVML. The module handle is passed in, so that tests bring their own."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang.kdtree.errors import KitError
from sglang.kdtree.optional import require

# NVML field ids of the summed NVLink data counters (nvml.h: NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX / RX), KiB.
NVLINK_TX_FIELD, NVLINK_RX_FIELD = 138, 139
ALL_LINKS = 0xFFFFFFFF


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    gpu: int
    sm_pct: int
    memory_pct: int  # share of time the memory controller was busy
    power_w: float
    power_limit_w: float
    sm_clock_mhz: int
    memory_clock_mhz: int
    pcie_rx_mb_s: float | None
    pcie_tx_mb_s: float | None
    nvlink_rx_mb_s: float | None  # since the sample before
    nvlink_tx_mb_s: float | None
    used_gb: float


class Nvml:
    def __init__(self, module: Any):
        self.module = module
        # (GPU, field) -> seconds and KiB since boot of the sample before
        self.counted: dict[tuple[int, int], tuple[float, int]] = {}
        try:
            module.nvmlInit()
            count = module.nvmlDeviceGetCount()
        except module.NVMLError as error:
            raise no_nvml(str(error)) from error
        self.handles = [
            module.nvmlDeviceGetHandleByIndex(index) for index in range(count)
        ]

    def names(self) -> list[str]:
        return [_text(self.module.nvmlDeviceGetName(handle)) for handle in self.handles]

    def driver(self) -> str:
        return _text(self.module.nvmlSystemGetDriverVersion())

    def sample(self, *, at_s: float, gpus: list[int]) -> list[Sample]:
        try:
            return [self._one(at_s, gpu) for gpu in gpus]
        except self.module.NVMLError as error:
            raise KitError(
                what=f"NVML's counters of GPU {', '.join(map(str, gpus))}",
                expected="utilisation, power, clocks and memory",
                got=str(error),
                remedy="A slice of a GPU (MIG, vGPU) has none: give whole GPUs with --gpus.",
            ) from error

    def _one(self, at_s: float, gpu: int) -> Sample:
        module, handle = self.module, self.handles[gpu]
        utilisation = module.nvmlDeviceGetUtilizationRates(handle)
        return Sample(
            at_s=at_s,
            gpu=gpu,
            sm_pct=utilisation.gpu,
            memory_pct=utilisation.memory,
            power_w=module.nvmlDeviceGetPowerUsage(handle) / 1000,
            power_limit_w=module.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
            sm_clock_mhz=module.nvmlDeviceGetClockInfo(handle, module.NVML_CLOCK_SM),
            memory_clock_mhz=module.nvmlDeviceGetClockInfo(
                handle, module.NVML_CLOCK_MEM
            ),
            pcie_rx_mb_s=self._pcie(handle, module.NVML_PCIE_UTIL_RX_BYTES),
            pcie_tx_mb_s=self._pcie(handle, module.NVML_PCIE_UTIL_TX_BYTES),
            nvlink_rx_mb_s=self._nvlink(at_s, gpu, NVLINK_RX_FIELD),
            nvlink_tx_mb_s=self._nvlink(at_s, gpu, NVLINK_TX_FIELD),
            used_gb=module.nvmlDeviceGetMemoryInfo(handle).used / 1e9,
        )

    def _pcie(self, handle: Any, counter: int) -> float | None:
        """KB/s over the last 20 ms; not offered by every card."""
        try:
            return self.module.nvmlDeviceGetPcieThroughput(handle, counter) / 1000
        except self.module.NVMLError:
            return None

    def _nvlink(self, at_s: float, gpu: int, field: int) -> float | None:
        kib = self._field(self.handles[gpu], field)
        before = self.counted.get((gpu, field))
        if kib is None:
            return None
        self.counted[gpu, field] = at_s, kib
        if before is None or before[0] >= at_s:
            return None
        return (kib - before[1]) * 1.024e-3 / (at_s - before[0])

    def _field(self, handle: Any, field: int) -> int | None:
        try:
            value = self.module.nvmlDeviceGetFieldValues(handle, [(field, ALL_LINKS)])[
                0
            ]
        except self.module.NVMLError:
            return None
        return (
            value.value.ullVal if value.nvmlReturn == self.module.NVML_SUCCESS else None
        )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def no_nvml(reason: str) -> KitError:
    return KitError(
        what="NVML",
        expected="an NVIDIA driver with its management library",
        got=reason,
        remedy="Run this on the machine with the GPUs; in a container, give it the NVIDIA runtime and the 'utility' capability.",
    )


def open_nvml() -> Nvml:
    return Nvml(require("pynvml", needed_for="GPU counters"))
