# SPDX-License-Identifier: Apache-2.0
"""Pack what a GPU host without a network lacks, into one folder that travels beside the checkout.

    python benchmark/pack_gpu.py [--out benchmark/bundle] [--arch 90a] [--wheel sgl_kernel_sm120-*.whl]
    bash benchmark/run_gpu.sh --bundle benchmark/bundle          # on the GPU host

  native/          build_native.py's libraries: the ladder, the probes, the two FlashInfer configurations
  sglang_kernels/  upstream's Triton attention kernels, files unchanged, with stand-ins for the helpers that they import
  site/            our kernel package, unpacked from its wheel (built here unless --wheel names one)
  COMMIT           of this checkout

The host needs Python, torch, Triton and pytest. The rest comes from the package index by name, or from files named
here.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE / "kernels"))

import build_native  # noqa: E402
from verify_bench.results import commit  # noqa: E402

LIMIT = 55 << 20
OPS = "sglang.kernels.ops.attention"
KERNEL_MODULES = tuple(f"{OPS}.{m}" for m in ("extend_attention", "decode_attention", "metadata"))
# What the kernel files import from the rest of sglang, and the answer on an NVIDIA GPU. An import that is not listed
# stops the packing.
STAND_INS = {
    "sglang.srt.utils": {
        "is_cuda": "def is_cuda():\n    return torch.version.cuda is not None\n",
        "is_hip": "def is_hip():\n    return False\n",
        "is_gfx95_supported": "def is_gfx95_supported():\n    return False\n",
        "is_gfx1250_supported": "def is_gfx1250_supported():\n    return False\n",
        "get_device_core_count": "def get_device_core_count(device_id=0):\n"
        "    return torch.cuda.get_device_properties(device_id).multi_processor_count\n",
    },
    "sglang.srt.environ": {
        "envs": "class _Unset:\n    def get(self):\n        return False\n\n\n"
        "class _Environment:\n    def __getattr__(self, name):\n        return _Unset()\n\n\nenvs = _Environment()\n",
    },
}
STAND_IN_HEADER = "# SPDX-License-Identifier: Apache-2.0\n# Stand-in of benchmark/pack_gpu.py, not upstream's file.\n"


def module_imports(source: str) -> list[tuple[str, tuple[str, ...]]]:
    """(module, names) of the sglang imports that run when the module is imported; those inside functions do not."""
    found = []
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        for child in ast.iter_child_nodes(pending.pop()):
            if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "sglang":
                found.append((child.module, tuple(a.name for a in child.names)))
            elif isinstance(child, ast.Import):
                found += [(a.name, ()) for a in child.names if a.name.split(".")[0] == "sglang"]
            elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                pending.append(child)
    return found


def kernel_tree(read: Callable[[str], str | None], roots: tuple[str, ...] = KERNEL_MODULES) -> dict[str, str]:
    """Path -> text of the packed tree. read(path) gives the text of a file of sglang's wheel, or None.

    Kernel modules are followed and kept as they are; any other sglang module becomes a stand-in of the names asked of
    it.
    """
    tree: dict[str, str] = {}
    wanted: dict[str, set[str]] = {}
    pending = list(roots)
    while pending:
        module = pending.pop()
        path = module.replace(".", "/") + ".py"
        if path in tree:
            continue
        text = read(path)
        if text is None:
            raise SystemExit(f"pack_gpu: sglang has no {path}")
        tree[path] = text
        for name, names in module_imports(text):
            if name.startswith(OPS + "."):
                pending.append(name)
            elif name in STAND_INS and names and set(names) <= STAND_INS[name].keys():
                wanted.setdefault(name, set()).update(names)
            else:
                raise SystemExit(
                    f"pack_gpu: {path} imports {', '.join(names) or 'all'} from {name}; add a stand-in for it"
                )
    for module, names in wanted.items():
        body = "\n\n".join(STAND_INS[module][n] for n in sorted(names))
        tree[module.replace(".", "/") + ".py"] = (
            STAND_IN_HEADER + ("\nimport torch\n" if "torch." in body else "") + "\n\n" + body
        )
    for path in list(tree):
        for parent in list(Path(path).parents)[:-1]:
            tree.setdefault(f"{parent.as_posix()}/__init__.py", STAND_IN_HEADER)
    return tree


def upstream_version() -> str:
    with open(ROOT / "python" / "UPSTREAM.toml", "rb") as f:
        return tomllib.load(f)["version"]


def download(name: str, folder: Path) -> Path:
    """A wheel from the package index, for whatever Python it is: only its .py files are used."""
    for tag in ((), ("--python-version", "3.12", "--implementation", "cp", "--platform", "manylinux_2_34_x86_64")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "-q",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            *tag,
            "-d",
            str(folder),
            name,
        ]
        if subprocess.run(command, check=False).returncode == 0:
            return next(folder.glob("*.whl"))
    raise SystemExit(f"pack_gpu: could not download {name}")


def pack_sglang(out: Path, wheel: Path | None) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        version = upstream_version() if wheel is None else wheel.name.split("-")[1]
        wheel = wheel or download(f"sglang=={version}", Path(tmp))
        with zipfile.ZipFile(wheel) as z:
            names = set(z.namelist())
            tree = kernel_tree(lambda path: z.read(path).decode() if path in names else None)
    shutil.rmtree(out, ignore_errors=True)
    for path, text in tree.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(text)
    (out / "VERSION").write_text(version + "\n")


def pack_ours(out: Path, wheel: Path | None, archs: list[str]) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        if wheel is None:
            command = [
                sys.executable,
                "-m",
                "pip",
                "-q",
                "wheel",
                "--no-deps",
                "-w",
                tmp,
                str(ROOT / "sgl-kernel-sm120"),
            ]
            subprocess.run(command, check=True, env={"SGL_KERNEL_SM120_ARCHS": " ".join(archs), **os.environ})
            wheel = next(Path(tmp).glob("sgl_kernel_sm120-*.whl"))
        shutil.rmtree(out, ignore_errors=True)
        with zipfile.ZipFile(wheel) as z:
            z.extractall(out)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "bundle")
    parser.add_argument("--arch", nargs="+", default=["90a"], help="compute capabilities to compile for (default: 90a)")
    parser.add_argument("--wheel", type=Path, help="a wheel of our kernel package (default: build one)")
    parser.add_argument(
        "--sglang-wheel", type=Path, help="an sglang wheel on disk (default: download the pinned version)"
    )
    parser.add_argument(
        "--flashinfer-wheel", type=Path, help="a flashinfer-python wheel on disk (default: download it)"
    )
    parser.add_argument(
        "--skip",
        nargs="*",
        choices=("native", "sglang", "package"),
        default=[],
        help="keep what the folder already holds",
    )
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if "native" not in args.skip:
        given = ["--flashinfer-wheel", str(args.flashinfer_wheel)] if args.flashinfer_wheel else []
        build_native.main(["--out", str(args.out / "native"), "--arch", *args.arch, *given])
    if "sglang" not in args.skip:
        pack_sglang(args.out / "sglang_kernels", args.sglang_wheel)
    if "package" not in args.skip:
        pack_ours(args.out / "site", args.wheel, args.arch)
    (args.out / "COMMIT").write_text(commit(ROOT) + "\n")
    size = sum(p.stat().st_size for p in args.out.rglob("*") if p.is_file())
    print(f"{args.out}: {size / 2**20:.1f} MiB")
    if size > LIMIT:
        print(f"pack_gpu: over the limit of {LIMIT >> 20} MiB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
