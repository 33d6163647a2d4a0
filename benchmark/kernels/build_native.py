# SPDX-License-Identifier: Apache-2.0
"""Compile the benchmark's own CUDA libraries: ladder, probes and the two FlashInfer configurations.

    python benchmark/kernels/build_native.py [--arch 90a ...] [--out benchmark/build/native] [--only ladder probes]

FlashInfer's headers come from the flashinfer-python wheel, downloaded by name from the package index (pip's
configuration decides which) unless --flashinfer-wheel names a file. Only headers are unpacked. No GPU is needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEFAULT_OUT = HERE.parent / "build" / "native"
DEFAULT_HEADERS = HERE.parent / "build" / "headers"
FLASHINFER_VERSION = "0.7.2"
SM120_SMEM_PER_SM = 102400  # bytes a multiprocessor of compute capability 12.0 has: 100 KB

# library -> (source, macros, needs FlashInfer's headers)
LIBRARIES = {
    "ladder": ("ladder/ladder.cu", (), False),
    "probes": ("probes/probes.cu", (), False),
    "flashinfer_mla_full": ("flashinfer_mla/flashinfer_mla.cu", ("SMEM_LIMIT=0",), True),
    "flashinfer_mla_100k": ("flashinfer_mla/flashinfer_mla.cu", (f"SMEM_LIMIT={SM120_SMEM_PER_SM}",), True),
}
# wheel folder -> include path below the unpacked root
HEADERS = ("include", "cccl/libcudacxx/include", "cccl/cub", "cccl/thrust")
HEADER_PREFIXES = tuple(
    f"flashinfer/data/{p}/" for p in ("include", "cccl/libcudacxx/include", "cccl/cub/cub", "cccl/thrust/thrust")
)


def find_nvcc() -> str:
    """$NVCC, nvcc on PATH, the usual toolkit folder, or the compiler of the nvidia-cuda-nvcc wheel."""
    usual = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    wheels = importlib.util.find_spec("nvidia")
    folders = list(wheels.submodule_search_locations or ()) if wheels else []
    for path in (
        os.environ.get("NVCC"),
        shutil.which("nvcc"),
        usual,
        *[Path(f) / "cu13" / "bin" / "nvcc" for f in folders],
    ):
        if path and Path(path).is_file():
            return str(path)
    raise SystemExit("build_native: no nvcc; put it on PATH, set NVCC=/path/to/nvcc, or pip install nvidia-cuda-nvcc")


def flashinfer_headers(root: Path, wheel: Path | None) -> list[Path]:
    """Unpack FlashInfer's headers below root (once) and return the include paths."""
    data = root / f"flashinfer-{FLASHINFER_VERSION}"
    stamp = data / "complete"
    if not stamp.exists():
        with tempfile.TemporaryDirectory() as tmp:
            if wheel is None:
                name = f"flashinfer-python=={FLASHINFER_VERSION}"
                subprocess.run(
                    [
                        sys.executable,
                        "-m",
                        "pip",
                        "-q",
                        "download",
                        "--no-deps",
                        "--only-binary=:all:",
                        "-d",
                        tmp,
                        name,
                    ],
                    check=True,
                )
                wheel = next(Path(tmp).glob("flashinfer_python-*.whl"))
            if f"-{FLASHINFER_VERSION}-" not in wheel.name:
                raise SystemExit(
                    f"build_native: the FlashInfer arms are written for {FLASHINFER_VERSION}, got {wheel.name}"
                )
            with zipfile.ZipFile(wheel) as z:
                z.extractall(data, [n for n in z.namelist() if n.startswith(HEADER_PREFIXES)])
        stamp.touch()
    return [data / "flashinfer" / "data" / p for p in HEADERS]


def command(
    nvcc: str, source: Path, out: Path, archs: list[str], macros: tuple[str, ...], includes: list[Path]
) -> list[str]:
    return [
        nvcc,
        "-O3",
        "-std=c++17",
        "-shared",
        "-lineinfo",
        "-Xcompiler=-fPIC",
        *[f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs],
        *[f"-D{m}" for m in macros],
        *[f"-I{p}" for p in includes],
        f"-L{Path(nvcc).resolve().parents[1] / 'lib'}",  # where the wheels have the CUDA runtime
        "-o",
        str(out),
        str(source),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument(
        "--arch",
        nargs="+",
        default=["90a"],
        help="compute capabilities to compile for, such as 90a 120a (default: 90a)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=LIBRARIES,
        default=list(LIBRARIES),
        metavar="NAME",
        help=f"of {', '.join(LIBRARIES)}",
    )
    parser.add_argument("--headers", type=Path, default=DEFAULT_HEADERS, help="where FlashInfer's headers are unpacked")
    parser.add_argument(
        "--flashinfer-wheel",
        type=Path,
        help=f"a flashinfer-python {FLASHINFER_VERSION} wheel on disk, instead of downloading it",
    )
    args = parser.parse_args(argv)
    nvcc = find_nvcc()
    args.out.mkdir(parents=True, exist_ok=True)
    built = {}
    for name in args.only:
        source, macros, needs_flashinfer = LIBRARIES[name]
        includes = flashinfer_headers(args.headers, args.flashinfer_wheel) if needs_flashinfer else []
        library = args.out / f"lib{name}.so"
        subprocess.run(command(nvcc, HERE / source, library, args.arch, macros, includes), check=True)
        built[name] = {"archs": args.arch, "bytes": library.stat().st_size}
        print(f"built {library} ({', '.join('sm_' + a for a in args.arch)})", flush=True)
    info_path = args.out / "build_info.json"
    info = json.loads(info_path.read_text()) if info_path.exists() else {}
    info.update(
        {
            "flashinfer": FLASHINFER_VERSION,
            "nvcc": nvcc_release(nvcc),
            "libraries": {**info.get("libraries", {}), **built},
        }
    )
    info_path.write_text(json.dumps(info, indent=2) + "\n")
    return 0


def nvcc_release(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    return next((line.split(",")[-1].strip() for line in text.splitlines() if "release" in line), "unknown")


if __name__ == "__main__":
    sys.exit(main())
