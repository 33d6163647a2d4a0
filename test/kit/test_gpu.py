# SPDX-License-Identifier: Apache-2.0
"""The GPU probe with a fake NVML: sampling, the regimes as published, bandwidth arithmetic."""

import argparse
import csv
import functools
import io
import threading
from types import SimpleNamespace

import jsonschema
import pytest
from kit.scripted import sglang_stream
from rich.console import Console

from sglang.kdtree.bench.client import Event, Reply
from sglang.kdtree.errors import KitError
from sglang.kdtree.probe import gpu
from sglang.kdtree.probe.nvml import Nvml, Sample
from sglang.kdtree.probe.regime import classify, effective_bandwidth_gb_s, means
from sglang.kdtree.result import Result
from sglang.kdtree.schemas import SCHEMAS


class FakeNvml(SimpleNamespace):
    """Two cards of 600 W; the second one has no NVLink counters and no PCIe counters."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES, NVML_SUCCESS = range(1, 6)

    class NVMLError(Exception):
        pass

    def __init__(self, sm=99, memory=1, power_mw=133_000, count=2):
        super().__init__(sm=sm, memory=memory, power_mw=power_mw, count=count, reads=0)

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA RTX PRO 6000 Blackwell"

    def nvmlSystemGetDriverVersion(self):
        return "580.65"

    def nvmlDeviceGetUtilizationRates(self, handle):
        self.reads += 1
        return SimpleNamespace(gpu=self.sm, memory=self.memory)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self.power_mw

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 600_000

    def nvmlDeviceGetClockInfo(self, handle, clock):
        return {self.NVML_CLOCK_SM: 2_400, self.NVML_CLOCK_MEM: 14_000}[clock]

    def nvmlDeviceGetPcieThroughput(self, handle, counter):
        if handle == 1:
            raise self.NVMLError("not supported")
        return 250_000

    def nvmlDeviceGetFieldValues(self, handle, fields):
        if handle == 1:
            return [SimpleNamespace(nvmlReturn=3, value=None)]
        return [SimpleNamespace(nvmlReturn=self.NVML_SUCCESS, value=SimpleNamespace(ullVal=1_000 * self.reads))]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=90_000_000_000)


def sample(at, sm, memory, power, limit=600.0, index=0, **other):
    values = dict(
        at_s=at, gpu=index, sm_pct=sm, memory_pct=memory, power_w=power, power_limit_w=limit, sm_clock_mhz=2_400,
        memory_clock_mhz=14_000, pcie_rx_mb_s=None, pcie_tx_mb_s=None, nvlink_rx_mb_s=None, nvlink_tx_mb_s=None,
        used_gb=90.0,
    )  # fmt: skip
    return Sample(**(values | other))


class TestRegime:
    @pytest.mark.parametrize(
        ("sm", "memory", "power", "limit", "name"),
        [
            (99.8, 1.2, 133.0, 600.0, "latency-bound"),  # Kimi K2.6's decode at 64k, TP 8, stock tree verify
            (99.8, 1.2, 133.0, 300.0, "latency-bound"),  # the same on the 300 W edition
            (99.4, 5.0, 302.0, 300.0, "compute-bound"),  # its prefill, at that card's limit
            (97.0, 71.0, 410.0, 600.0, "bandwidth-bound"),
            (31.0, 4.0, 110.0, 600.0, "host-bound"),
            (99.0, 30.0, 300.0, 600.0, "mixed"),
        ],
    )
    def test_names(self, sm, memory, power, limit, name):
        got = classify(means([sample(0.0, sm, memory, power, limit)]))
        assert got.name == name
        assert f"{sm:.1f} %" in got.reasoning and got.remedy

    def test_means_over_samples_and_gpus(self):
        m = means([sample(0.0, 100, 1, 130.0), sample(0.0, 98, 3, 140.0, index=1), sample(1.0, 99, 2, 135.0)])
        assert (m.samples, m.sm_pct, m.memory_pct, m.power_w) == (3, 99.0, 2.0, 135.0)
        assert m.pcie_rx_mb_s is None and m.nvlink_rx_mb_s is None

    def test_effective_bandwidth_of_a_published_step(self):
        """63,903 tokens x 70,272 B in a step of 0.357 s: 12.6 GB/s of 1,792."""
        got = effective_bandwidth_gb_s(context=63_903, cell_bytes=70_272, step_s=0.357)
        assert got == pytest.approx(63_903 * 70_272 / 0.357 / 1e9) == pytest.approx(12.58, abs=0.01)


class TestNvml:
    def test_a_sample_of_each_gpu(self):
        nvml = Nvml(FakeNvml())
        first, second = nvml.sample(at_s=1.5, gpus=[0, 1])
        assert (first.gpu, first.sm_pct, first.memory_pct, first.power_w, first.power_limit_w) == (
            0,
            99,
            1,
            133.0,
            600.0,
        )
        assert first.pcie_rx_mb_s == 250.0 and first.used_gb == 90.0
        assert second.pcie_rx_mb_s is None and second.nvlink_rx_mb_s is None
        assert nvml.names()[0] == "NVIDIA RTX PRO 6000 Blackwell"

    def test_nvlink_is_the_growth_of_its_counters(self):
        """1,000 KiB a reading of the utilisation: two GPUs, two readings a sample; then 2,000 KiB in 0.5 s."""
        nvml = Nvml(FakeNvml())
        seen = [nvml.sample(at_s=at, gpus=[0, 1])[0].nvlink_rx_mb_s for at in (1.0, 1.5, 1.5, 3.5)]
        assert seen == [None, 2_000 * 1024 / 0.5 / 1e6, None, 2_000 * 1024 / 2 / 1e6]

    def test_a_counter_that_a_slice_of_a_gpu_lacks(self):
        nvml = Nvml(FakeNvml())

        def power(handle):
            raise FakeNvml.NVMLError("Not Supported")

        nvml.module.nvmlDeviceGetPowerUsage = power
        with pytest.raises(KitError, match="GPU 0, 1.*Not Supported.*whole GPUs"):
            nvml.sample(at_s=0.0, gpus=[0, 1])

    def test_without_a_driver_the_message_says_so(self, cli_error, monkeypatch):
        import pynvml

        def no_library():
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

        monkeypatch.setattr(pynvml, "nvmlInit", no_library)
        error = cli_error("probe", "gpu", "--watch", 1)
        assert error["what"] == "NVML" and "NVIDIA runtime" in error["remedy"]

    def test_without_the_package_its_name_is_given(self, cli_error, monkeypatch):
        import sys

        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert "pip install nvidia-ml-py" in cli_error("probe", "gpu", "--watch", 1)["remedy"]

    @pytest.mark.parametrize("text", ["2", "-1", "x", "0,7", ""])
    def test_a_gpu_that_is_not_there(self, text):
        with pytest.raises(KitError, match="numbers from 0 to 1"):
            gpu.chosen_gpus(text, 2)


def arguments(**changes):
    defaults = dict(
        watch=None, interval=0.005, gpus=None, model_config=None, kv_dtype=None, peak_bandwidth=None, csv=None,
        plot=None, url="http://x", api="sglang", model=None, api_key=None, timeout=600.0, context=300, text="prose",
        output_tokens=33,
    )  # fmt: skip
    return argparse.Namespace(**(defaults | changes))


class Clock:
    """Counts its readings as seconds, and those of the request's thread on their own."""

    def __init__(self):
        self.read = threading.Condition()
        self.sampled, self.received = [], []

    def __call__(self):
        times = self.sampled if threading.current_thread() is threading.main_thread() else self.received
        with self.read:
            times.append(float(len(self.sampled) + len(self.received)))
            self.read.notify_all()
            return times[-1]

    def wait_for(self, condition):
        with self.read:
            assert self.read.wait_for(condition, timeout=600)

    def wait_for_samples(self, count, *, after):
        """Returns when so many samples were taken after the request's thread read this clock `after` times."""
        self.wait_for(lambda: len(self.received) >= after)
        begin = self.received[after - 1]
        self.wait_for(lambda: sum(at > begin for at in self.sampled) > count)  # the last one may not be complete


class TestVerb:
    def test_watching_writes_csv_and_plot(self, tmp_path):
        args = arguments(watch=10, csv=tmp_path / "s.csv", plot=tmp_path / "s.png", gpus="1")
        result = gpu.run(args, Console(stderr=True), nvml=Nvml(FakeNvml()), clock=Clock())
        document = result.document()
        jsonschema.validate(document, SCHEMAS["probe-gpu"])
        assert document["phases"]["watch"]["regime"]["name"] == "latency-bound" and result.exit_code == 1
        assert document["gpus"] == [{"index": 1, "name": "NVIDIA RTX PRO 6000 Blackwell"}]
        rows = list(csv.DictReader((tmp_path / "s.csv").open()))
        # 0 s gives the end, 10 s; then a look at the clock and a sample by turns.
        assert [float(row["at_s"]) for row in rows] == [2.0, 4.0, 6.0, 8.0, 10.0]
        assert document["phases"]["watch"]["means"]["samples"] == 5
        assert {row["gpu"] for row in rows} == {"1"} and rows[0]["power_w"] == "133.0"
        assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"

    def test_a_decode_is_run_and_its_bandwidth_derived(self, scripted, data):
        clock = Clock()

        def generate(body):
            """One sample at least before each message: `after` counts the sending and the messages received."""
            stream = sglang_stream([1, 9, 17, 25, 33], prompt_tokens=300, verify=4)
            waits = [functools.partial(clock.wait_for_samples, 2, after=1 + i) for i in range(len(stream))]
            return [part for pair in zip(waits, stream, strict=True) for part in pair]

        scripted.pages["/generate"] = (200, generate)
        scripted.pages["/tokenize"] = (200, lambda body: {"count": len(body["prompt"].split())})
        args = arguments(url=scripted.url, model_config=data / "kimi_k2_6.json", timeout=600.0)
        result = gpu.run(args, Console(stderr=True), nvml=Nvml(FakeNvml(sm=99, memory=60)), clock=clock)
        document = result.document()
        jsonschema.validate(document, SCHEMAS["probe-gpu"])
        decode = document["decode"]
        sent, first, *_, last = clock.received
        assert len(clock.received) == 6 and decode["step_ms"] == pytest.approx(1000 * (last - first) / 4)
        assert decode["accept_length"] == 8.0 and decode["kv_bytes_per_token_per_rank"] == 70_272
        assert decode["effective_kv_gb_s"] == pytest.approx(300 * 70_272 / (decode["step_ms"] / 1000) / 1e9)
        assert decode["peak_gb_s"] == 1792.0
        samples = {phase: row["means"]["samples"] for phase, row in document["phases"].items()}
        assert samples.keys() == {"prefill", "decode"}
        assert samples["prefill"] >= 2 * 2 and samples["decode"] >= 4 * 2 * 2, "two GPUs, two samples for each message"

    def test_the_servers_own_model_is_taken_where_it_lies_here(self, data, tmp_path):
        (tmp_path / "config.json").write_text((data / "kimi_k2_6.json").read_text())
        assert gpu.served_target({"model_path": str(tmp_path)}).num_layers == 61
        for elsewhere in ({}, {"model_path": "moonshotai/Kimi-K2.6"}, {"model_path": str(tmp_path / "none")}):
            assert gpu.served_target(elsewhere) is None

    def test_samples_are_told_apart_by_the_first_token(self):
        reply = Reply(
            sent_at=1.0,
            text="",
            events=[Event(at=at, completion_tokens=n) for at, n in ((3.0, 1), (5.0, 9))],
            prompt_tokens=10,
            completion_tokens=9,
        )
        phases = gpu.split_phases([sample(at, 99, 1, 130.0) for at in (0.5, 1.0, 2.9, 3.0, 5.0, 5.1)], reply)
        assert [s.at_s for s in phases["prefill"]] == [1.0, 2.9]
        assert [s.at_s for s in phases["decode"]] == [3.0, 5.0]

    def test_live_table_and_plot_show_every_column_of_the_csv(self):
        columns = list(Sample.__struct_fields__)
        assert ["at_s", "gpu", *gpu.COLUMNS] == columns
        assert [key for keys in gpu.PANELS.values() for key in keys] == columns[2:]
        full = sample(0.0, 99, 1, 130.0, **dict.fromkeys(columns[8:12], 12_345.6))
        console = Console(width=80, file=io.StringIO())
        console.print(gpu.live_table([full, sample(0.0, 7, 1, 130.0, index=1)]))
        first, second = console.file.getvalue().splitlines()[-2:]
        assert first.split() == ["0", "99", "1", "130", "600", "2,400", "14,000", *["12,346"] * 4, "90"]
        assert second.split() == ["1", "7", "1", "130", "600", "2,400", "14,000", *["-"] * 4, "90"]

    def test_the_table_of_the_means_names_everything_that_was_sampled(self):
        samples = [
            sample(
                0.0, 98, 1, 130.0, nvlink_rx_mb_s=1024.0, nvlink_tx_mb_s=0.0, pcie_rx_mb_s=100.0, pcie_tx_mb_s=300.0
            ),
            sample(
                1.0, 100, 3, 136.0, nvlink_rx_mb_s=1024.0, nvlink_tx_mb_s=0.0, pcie_rx_mb_s=200.0, pcie_tx_mb_s=300.0
            ),
        ]
        data = gpu.report({"watch": samples}, ["NVIDIA X"], [0], "580") | {"decode": None}
        console = Console(width=200, file=io.StringIO())
        gpu.render(Result(verb="probe-gpu", data=data, exit_code=1), console)
        (row,) = [line for line in console.file.getvalue().splitlines() if line.startswith("\u2502 watch")]
        assert [cell.strip() for cell in row.strip("\u2502").split("\u2502")] == [
            "watch", "2", "99.0", "2.0", "133", "600", "2,400/14,000", "150/300", "1,024/0", "90", "latency-bound",
        ]  # fmt: skip
        watched = sample(0.0, 98, 1, 130.0)  # a card without PCIe and NVLink counters
        data = gpu.report({"watch": [watched]}, ["NVIDIA X"], [0], "580") | {"decode": None}
        console = Console(width=200, file=io.StringIO())
        gpu.render(Result(verb="probe-gpu", data=data, exit_code=1), console)
        assert console.file.getvalue().count("-/-") == 2
