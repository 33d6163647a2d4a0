# SPDX-License-Identifier: Apache-2.0
"""The verify kernel in a program without torch (verify_alone.cu), and compute-sanitizer over it.

    python benchmark/kernels/verify_alone.py build [--arch 90a]   two programs: product and every_lane
    python benchmark/kernels/verify_alone.py sanitize --out RAW   all four tools, bf16 and fp8; exit code 1 on an error

Lane 0 of a warp arrives at a barrier for all lanes, after __syncwarp. racecheck does not follow that, so that it gets a
build of the same source in which every lane arrives (SGL_KERNEL_EVERY_LANE_ARRIVES); the other tools take the product.
RAW/sanitizer_*.txt holds what they print, by the names that verify_experiments.py reads.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from build_native import HERE, find_nvcc
from verify_experiments import read_sanitizer

CSRC = HERE.parents[1] / "sgl-kernel-sm120" / "csrc"
DEFAULT_OUT = HERE.parent / "build" / "verify_alone"
# program -> macros, and the tools that run it
BUILDS = {
    "product": ((), ("memcheck", "initcheck", "synccheck")),
    "every_lane": (("SGL_KERNEL_EVERY_LANE_ARRIVES",), ("racecheck",)),
}
KV_DTYPES = ("bf16", "fp8")
SECONDS = 300  # of one tool


def build(out: Path, arch: str) -> None:
    nvcc = find_nvcc()
    sources = [HERE / "verify_alone.cu", *sorted((CSRC / "mla_tree_verify" / "instantiations").glob("*.cu"))]
    common = [nvcc, "-O3", "-std=c++17", "-lineinfo", f"-gencode=arch=compute_{arch},code=sm_{arch}", f"-I{CSRC}"]
    commands, objects = [], {}
    for name, (macros, _) in BUILDS.items():
        folder = out / "obj" / name
        folder.mkdir(parents=True, exist_ok=True)
        objects[name] = [str(folder / f"{source.stem}.o") for source in sources]
        for source, unit in zip(sources, objects[name], strict=True):
            commands.append([*common, *(f"-D{m}" for m in macros), "-c", str(source), "-o", unit])
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    runtime = Path(nvcc).resolve().parents[1] / "lib"  # where the wheels have the CUDA runtime
    for name, units in objects.items():
        subprocess.run([nvcc, f"-L{runtime}", "-o", str(out / name), *units], check=True)
        print(f"built {out / name} (sm_{arch})", flush=True)


def sanitize(programs: Path, out: Path) -> int:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise SystemExit("verify_alone: no compute-sanitizer on PATH; it comes with the CUDA toolkit")
    missing = [name for name in BUILDS if not (programs / name).is_file()]
    if missing:
        raise SystemExit(f"verify_alone: {programs} lacks {', '.join(missing)}; the verb build makes them")
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, (_, tools) in BUILDS.items():
        for tool in tools:
            for kv in KV_DTYPES:
                path = out / f"sanitizer_{name}_{tool}_{kv}.txt"
                command = [sanitizer, "--tool", tool, str(programs / name), "check", kv, "small"]
                with path.open("w") as log:
                    rc = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=SECONDS).returncode
                errors = read_sanitizer(path.stem, path.read_text(), name)["errors"]
                failed += errors > 0 or rc != 0
                print(f"{tool:10} {kv:5} {name:11} {errors} errors, exit code {rc}", flush=True)
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("build", "sanitize"))
    parser.add_argument("--arch", default="90a", help="of build: compute capability (90a), such as 120a")
    parser.add_argument("--programs", type=Path, default=DEFAULT_OUT, help="the folder of the two programs")
    parser.add_argument("--out", type=Path, help="of sanitize: a folder for what the tools print")
    args = parser.parse_args(argv)
    if args.verb == "build":
        build(args.programs, args.arch)
        return 0
    if args.out is None:
        parser.error("sanitize needs --out FOLDER")
    return sanitize(args.programs, args.out)


if __name__ == "__main__":
    sys.exit(main())
