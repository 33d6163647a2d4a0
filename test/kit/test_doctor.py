# SPDX-License-Identifier: Apache-2.0
"""Each check of the doctor, healthy and ill; the whole on this machine without a GPU."""

import functools
import re
import resource
import socket
import sys
from collections import Counter, namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit.test_gpu import FakeNvml

from sglang.kdtree.doctor import install, machine, selftest
from sglang.kdtree.doctor.check import FAIL, OK, WARN, Finding, run_checks
from sglang.kdtree.probe.nvml import Nvml, no_nvml

Usage = namedtuple("Usage", "total used free")
GIB = 1 << 30


def status(findings):
    return [finding.status for finding in findings]


class Cards(FakeNvml):
    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_STATUS_OK = 0, 0

    def __init__(self, *, cuda=13_000, width=16, limit=600_000, peer=0, count=2):
        super().__init__(count=count)
        self.cuda, self.width, self.limit, self.peer = cuda, width, limit, peer

    def nvmlSystemGetCudaDriverVersion(self):
        return self.cuda

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle):
        return self.width

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):
        return 16

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return self.limit

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle):
        return 600_000

    def nvmlDeviceGetP2PStatus(self, a, b, index):
        return self.peer


def cards(**changes):
    return lambda: Nvml(Cards(**changes))


def no_driver():
    raise no_nvml("NVML Shared Library Not Found")


class TestInstallation:
    def test_fork(self):
        assert status(install.fork(lambda name: "0.5.23")) == [FAIL]
        assert status(install.fork(lambda name: None)) == [FAIL]

    def site(self, tmp_path, monkeypatch, *, present):
        """An installation with the notice that the overlay writes, and these of its files."""
        from overlay.pack import CHANGES, changes

        plan = SimpleNamespace(
            own={"sglang/kdtree/cli.py": None, "sglang/_x.py": None},
            edits=[
                SimpleNamespace(module="sglang/srt/a.py", symbol=symbol, why="because (of sglang/srt/b.py)")
                for symbol in ("f", "", "g")
            ],
        )
        pin = SimpleNamespace(name="sglang", version="0.5.23", fork_version="0.5.23+kdtree.1")
        info = tmp_path / "sglang-0.5.23+kdtree.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: sglang\nVersion: 0.5.23+kdtree.1\n")
        (info / CHANGES).write_text(changes(pin, plan))
        for path in present:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).touch()
        monkeypatch.setattr(install.metadata, "distribution", lambda name: install.metadata.PathDistribution(info))
        return info / CHANGES

    def test_the_delta_is_read_from_the_overlays_notice(self, tmp_path, monkeypatch):
        self.site(tmp_path, monkeypatch, present=["sglang/kdtree/cli.py", "sglang/_x.py", "sglang/srt/a.py"])
        (finding,) = install.fork(lambda name: "0.5.23+kdtree.1")
        assert finding.status == OK
        assert finding.detail == "sglang 0.5.23+kdtree.1: 2 files of its own, 1 of upstream's edited"

    def test_a_part_of_the_fork_that_is_missing(self, tmp_path, monkeypatch):
        notice = self.site(tmp_path, monkeypatch, present=["sglang/kdtree/cli.py", "sglang/srt/a.py"])
        (finding,) = install.fork(lambda name: "0.5.23+kdtree.1")
        assert finding.status == FAIL and "1 files are missing, first sglang/_x.py" in finding.detail
        notice.unlink()
        assert status(install.fork(lambda name: "0.5.23+kdtree.1")) == [WARN]

    def test_this_installation(self):
        if "+kdtree" not in (version := install.distribution_version("sglang") or ""):
            pytest.skip("the fork is not installed: make test installs it")
        (finding,) = install.fork()
        assert finding.status == OK, finding.detail
        own, edited = install.notice()
        assert "sglang/srt/layers/attention/kdtree_backend.py" in own and "sglang/srt/server_args.py" in edited
        assert finding.detail.startswith(f"sglang {version}: {len(own)} files of its own, {len(edited)} of ")

    def test_both_names_are_registered_where_the_fork_is_installed(self):
        if "+kdtree" not in (install.distribution_version("sglang") or ""):
            pytest.skip("the fork is not installed: make test installs it")
        assert status(install.backend_registration()) == [OK, OK]

    def test_a_backend_that_is_not_registered(self, monkeypatch):
        monkeypatch.setattr(install, "BACKEND_MODULE", "sglang.srt.layers.attention.triton_backend")
        monkeypatch.setattr(install, "BACKEND", "no_such_backend")
        monkeypatch.setattr(install, "ALGORITHM", "NOSUCH")
        assert status(install.backend_registration()) == [FAIL, FAIL]
        monkeypatch.setattr(install, "BACKEND_MODULE", "sglang.srt.layers.attention.no_such_module")
        assert status(install.backend_registration()) == [FAIL]

    def test_plugins_are_named(self):
        entry = SimpleNamespace(name="shiny", value="shiny:activate")

        def entry_points(*, group):
            return [entry] if group.endswith("plugins") else []

        (finding,) = install.plugins(entry_points)
        assert finding.status == WARN and "shiny:activate" in finding.detail
        assert status(install.plugins(lambda *, group: [])) == [OK]

    @pytest.mark.parametrize(
        ("archs", "capability", "covered"),
        [
            (["80", "90a", "120a"], (12, 0), True),
            (["80", "90a", "120a"], (9, 0), True),
            (["80"], (8, 9), True),  # plain code runs on later GPUs of its major version
            (["89"], (8, 0), False),
            (["80", "90a"], (12, 0), False),
            (["120a"], (12, 1), False),  # arch-specific code runs on its own GPU only
            ([], (12, 0), False),
        ],
    )
    def test_code_for_the_gpu(self, archs, capability, covered):
        assert install.covers(archs, *capability) is covered
        info = {"version": "1", "archs": archs, "cuda_ops": ["mla_tree_verify"]}
        assert status(install.judge_archs(info, [capability])) == [OK if covered else FAIL]

    def test_a_library_that_did_not_load(self):
        info = {"version": "1", "archs": ["120a"], "cuda_ops": []}
        assert status(install.judge_archs(info, [(12, 0)])) == [FAIL]
        assert status(install.judge_archs(info, [])) == [OK]  # nothing to run it on

    def test_no_kernel_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sgl_kernel_sm120", None)
        (finding,) = install.kernel_package(list)
        assert finding.status == FAIL and "pip install ./sgl-kernel-sm120" in finding.remedy


class TestSelfTests:
    def test_the_kernel_package_passes(self):
        assert status(selftest.tree_core()) == [OK]
        assert status(selftest.verify_op()) == [OK]

    def test_a_tree_verified_as_a_chain_is_noticed(self, monkeypatch):
        import sgl_kernel_sm120 as kernels

        real = kernels.mla_tree_verify

        def causal(*args, tree_mask=None, mask_layout=None, **options):
            return real(*args, **options)

        monkeypatch.setattr(kernels, "mla_tree_verify", causal)
        assert status(selftest.verify_op()) == [FAIL]

    def test_a_gpu_whose_kernel_is_wrong_is_named(self, monkeypatch):
        import torch

        right = selftest.visible_means("cpu")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(selftest, "visible_means", lambda device: [0.0] * 3 if device == "cuda:1" else right)
        (finding,) = selftest.verify_op()
        assert finding.status == FAIL and finding.detail == f"GPU 1: means {[0.0] * 3} instead of {right}"
        monkeypatch.setattr(selftest, "visible_means", lambda device: right)
        (finding,) = selftest.verify_op()
        assert finding.status == OK and finding.detail.endswith("(CPU, GPU 0, GPU 1)")

    def test_a_wrong_tie_break_is_noticed(self, monkeypatch):
        import sgl_kernel_sm120 as kernels

        real = kernels.ddtree_build
        monkeypatch.setattr(kernels, "ddtree_build", lambda root, ids, scores, n: real(root, ids.flip(-1), scores, n))
        assert status(selftest.tree_core()) == [FAIL]


class TestMachine:
    def test_driver(self):
        assert status(machine.driver(cards())) == [OK, OK, OK]
        assert status(machine.driver(cards(cuda=12_080))) == [FAIL]
        assert status(machine.driver(no_driver)) == [WARN]
        assert "CUDA 13.0" in list(machine.driver(cards()))[0].detail

    def test_lanes_and_power(self):
        assert status(machine.driver(cards(width=8))) == [OK, WARN, OK]
        assert status(machine.driver(cards(limit=300_000))) == [OK, OK, WARN]

    def test_peer_access(self):
        assert status(machine.peers(cards(), {})) == [OK]
        (blocked,) = machine.peers(cards(peer=3), {})
        assert blocked.status == WARN and "0-1" in blocked.detail and "iommu" in blocked.remedy
        assert list(machine.peers(cards(count=1), {})) == list(machine.peers(no_driver, {})) == []

    @pytest.mark.parametrize(
        ("total", "gpus", "expected"), [(64 << 20, 8, FAIL), (64 << 20, 1, WARN), (8 * GIB, 8, OK)]
    )
    def test_host_shared_memory(self, total, gpus, expected):
        (finding,) = machine.host_shared_memory(gpus, usage=lambda path: Usage(total, 0, total))
        assert finding.status == expected
        assert ("--shm-size" in finding.remedy) == (expected != OK)

    def test_allocator(self):
        wanted = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8"}
        assert status(machine.allocator(wanted, 8)) == [OK]
        assert status(machine.allocator({}, 8)) == [WARN]
        assert status(machine.allocator({}, 0)) == [OK]

    def test_port(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            assert status(machine.port_free(port)) == [WARN]
        assert status(machine.port_free(port)) == [OK]

    def test_model_cache(self, tmp_path):
        environ = {"HF_HOME": str(tmp_path / "not" / "yet")}
        assert status(machine.model_cache(environ, lambda path: Usage(0, 0, 900 * GIB))) == [OK]
        assert status(machine.model_cache(environ, lambda path: Usage(0, 0, 3 * GIB))) == [WARN]

    def test_open_files(self):
        (short,) = machine.open_files((1024, 4096))
        (soft,) = machine.open_files((1024, 1 << 20))
        assert status([short, soft]) == [WARN, WARN]
        assert "ulimit" not in short.remedy.split() and soft.remedy.startswith("ulimit -n 65536, or ")
        for limits in ((65_536, 65_536), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)):
            assert status(machine.open_files(limits)) == [OK]


class TestWhole:
    def test_a_check_that_crashes_is_a_finding_and_the_rest_goes_on(self):
        def crash():
            raise RuntimeError("boom")

        def healthy():
            return [Finding("b", OK, "fine")]

        findings = run_checks([("a", crash), ("b", healthy)])
        assert status(findings) == [FAIL, OK] and "boom" in findings[0].detail

    def test_on_this_machine(self, cli):
        """No GPU is needed; nothing may crash. Whether the fork itself is installed depends on the environment."""
        code, document = cli("doctor", "--port", 0)
        checks = {row["name"]: row for row in document["checks"]}
        assert not any("the check itself failed" in row["detail"] for row in checks.values())
        assert {checks[name]["status"] for name in ("Python", "tree core", "verify op", "port")} == {OK}
        assert code == (1 if document["counts"]["FAIL"] else 0)
        assert sum(document["counts"].values()) == len(document["checks"])

    @pytest.mark.parametrize("port", [-1, 65536])
    def test_a_port_that_is_none(self, cli_error, port):
        assert cli_error("doctor", "--port", port)["what"] == "--port"

    def test_the_table_shows_the_remedy(self, capsys, monkeypatch):
        from sglang.kdtree.cli import main
        from sglang.kdtree.doctor import verb

        ill = functools.partial(machine.allocator, {}, 8)
        monkeypatch.setattr(verb, "checks", lambda args: [("allocator", ill)])
        assert main(["doctor"]) == 0
        printed = capsys.readouterr().out
        assert "WARN" in printed and "expandable_segments" in printed and "0 OK, 1 WARN, 0 FAIL" in printed


def test_the_readme_shows_what_is_printed(cli, monkeypatch):
    """The checks by name and in order, and their sum, as a machine without a GPU gives them."""
    import torch

    def none():
        raise no_nvml("NVML Shared Library Not Found")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for check in ("driver", "peers"):
        monkeypatch.setattr(machine, check, functools.partial(getattr(machine, check), none))
    _, document = cli("doctor", "--port", 0)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = re.search(r"^\$ python -m sglang\.kdtree doctor.*?^(\d+ OK, .*?)$", readme, re.M | re.S)
    rows = re.findall(r"^(OK|WARN|FAIL) +(\S.*?)  +(\S.*)$", shown[0], re.M)
    assert [name for _, name, _ in rows] == [check["name"] for check in document["checks"]]
    counts = Counter(state for state, _, _ in rows)
    assert shown[1] == f"{counts[OK]} OK, {counts[WARN]} WARN, {counts[FAIL]} FAIL"
    (gpu,) = [check for check in document["checks"] if check["name"] == "GPU"]
    assert (gpu["status"], "GPU", gpu["detail"]) in rows and f"-> {gpu['remedy']}\n" in shown[0]
    limits = re.search(r"limit (\d+) \(hard (\d+)\)", shown[0])
    (files,) = machine.open_files(tuple(map(int, limits.groups())))
    assert f"-> {files.remedy}\n" in shown[0]
