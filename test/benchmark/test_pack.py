# SPDX-License-Identifier: Apache-2.0
"""What travels to an offline GPU host."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import build_native
import pack_gpu
import pytest

EXTEND = "sglang/kernels/ops/attention/extend_attention.py"
OPS = "sglang/kernels/ops/attention"
FILES = {
    EXTEND: "import torch\n"
    "from sglang.kernels.ops.attention.decode_attention import helper\n"
    "from sglang.srt.utils import is_cuda, is_hip\n",
    f"{OPS}/decode_attention.py": "from sglang.srt.environ import envs\n\n\n"
    "def helper():\n    from sglang.srt.runtime_context import get_exec\n",
    f"{OPS}/metadata.py": "import torch\n",
}


def test_kernel_files_are_kept_and_helpers_stood_in():
    tree = pack_gpu.kernel_tree(FILES.get)
    assert {p: t for p, t in tree.items() if p in FILES} == FILES, "upstream's files travel unchanged"
    assert "def is_cuda" in tree["sglang/srt/utils.py"] and "def is_hip" in tree["sglang/srt/utils.py"]
    assert "get_device_core_count" not in tree["sglang/srt/utils.py"], "only what is asked for"
    packages = {p for p in tree if p.endswith("__init__.py")}
    assert {
        f"sglang/{p}__init__.py" for p in ("", "srt/", "kernels/", "kernels/ops/", "kernels/ops/attention/")
    } == packages


@pytest.mark.parametrize(
    "line",
    ["from sglang.srt.utils import is_npu", "from sglang.srt.server_args import ServerArgs", "import sglang.srt.utils"],
)
def test_a_new_import_of_upstream_stops_the_packing(line):
    with pytest.raises(SystemExit, match="extend_attention.py imports .* add a stand-in"):
        pack_gpu.kernel_tree({**FILES, EXTEND: line + "\n"}.get)


def test_a_missing_kernel_file_stops_the_packing():
    with pytest.raises(SystemExit, match="sglang has no .*metadata.py"):
        pack_gpu.kernel_tree({k: v for k, v in FILES.items() if "metadata" not in k}.get)


def upstream_root():
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("sglang is not installed")
    return Path(spec.origin).parents[1]


def test_the_pinned_upstream_packs_and_imports_alone(tmp_path):
    """The installed sglang's kernel files, in a process that sees no other sglang."""
    root = upstream_root()
    tree = pack_gpu.kernel_tree(lambda path: (root / path).read_text() if (root / path).is_file() else None)
    for path, text in tree.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from sglang.kernels.ops.attention import decode_attention, extend_attention, metadata\n"
        "print(sorted({m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'sglang'}))\n"
        "extend_attention.extend_attention_fwd, decode_attention.decode_attention_fwd\n"
        "metadata.get_num_kv_splits_triton\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    files = done.stdout.splitlines()[0]
    assert str(root) not in files.replace(str(tmp_path), "") and str(tmp_path) in files


def test_pack_from_wheels(tmp_path, capsys):
    sglang, ours = tmp_path / "sglang-9.9-cp312-cp312-linux.whl", tmp_path / "sgl_kernel_sm120-1.0-py3-none-any.whl"
    with zipfile.ZipFile(sglang, "w") as z:
        for path, text in FILES.items():
            z.writestr(path, text)
    with zipfile.ZipFile(ours, "w") as z:
        z.writestr("sgl_kernel_sm120/__init__.py", "")
    out = tmp_path / "bundle"
    (out / "site" / "stale").mkdir(parents=True)
    args = ["--out", str(out), "--skip", "native", "--sglang-wheel", str(sglang), "--wheel", str(ours)]
    assert pack_gpu.main(args) == 0
    assert (out / "sglang_kernels" / "VERSION").read_text() == "9.9\n"
    assert (out / "sglang_kernels" / EXTEND).read_text() == FILES[EXTEND]
    assert (out / "site" / "sgl_kernel_sm120" / "__init__.py").exists() and len((out / "COMMIT").read_text()) > 6
    assert not (out / "site" / "stale").exists()
    assert "MiB" in capsys.readouterr().out


def test_the_size_limit_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pack_gpu, "LIMIT", 100)
    (tmp_path / "big").write_bytes(bytes(200))
    assert pack_gpu.main(["--out", str(tmp_path), "--skip", "native", "sglang", "package"]) == 1
    assert "over the limit" in capsys.readouterr().err


def test_pinned_version_is_read_from_the_pin():
    assert pack_gpu.upstream_version().count(".") == 2


def test_compile_command_names_every_arch_and_header_folder(tmp_path):
    command = build_native.command(
        "nvcc", Path("a.cu"), tmp_path / "liba.so", ["90a", "120a"], ("SMEM_LIMIT=102400",), [Path("inc")]
    )
    assert "-gencode=arch=compute_90a,code=sm_90a" in command and "-gencode=arch=compute_120a,code=sm_120a" in command
    assert "-DSMEM_LIMIT=102400" in command and "-Iinc" in command and command[-1] == "a.cu"


def test_nvcc_is_found_or_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(build_native.shutil, "which", lambda name: None)
    monkeypatch.setattr(build_native.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("NVCC", raising=False)
    with pytest.raises(SystemExit, match="no nvcc; put it on PATH"):
        build_native.find_nvcc()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert build_native.find_nvcc() == str(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("NVCC", __file__)
    assert build_native.find_nvcc() == __file__


def test_headers_alone_are_unpacked_and_another_version_is_refused(tmp_path):
    wheel = tmp_path / f"flashinfer_python-{build_native.FLASHINFER_VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("flashinfer/data/include/flashinfer/attention/mla.cuh", "x")
        z.writestr("flashinfer/data/csrc/a.cu", "x")
        z.writestr("flashinfer/mla.py", "x")
    folders = build_native.flashinfer_headers(tmp_path / "headers", wheel)
    assert (folders[0] / "flashinfer" / "attention" / "mla.cuh").exists()
    names = {p.name for p in (tmp_path / "headers").rglob("*") if p.is_file()}
    assert names == {"mla.cuh", "complete"}
    other = wheel.rename(tmp_path / "flashinfer_python-0.1.0-py3-none-any.whl")
    with pytest.raises(SystemExit, match="written for"):
        build_native.flashinfer_headers(tmp_path / "again", other)


def test_every_source_that_is_built_exists():
    for source, _, _ in build_native.LIBRARIES.values():
        assert (build_native.HERE / source).is_file()
