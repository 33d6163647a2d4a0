#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Test, time and sanitize the kernels on a GPU host, with or without a network. Everything lands in one folder.
#
#   bash benchmark/run_gpu.sh [--bundle DIR] [--out DIR] [STEP...] [-- ARGUMENTS OF THE BENCHMARK]
#
# STEP: test (pytest -m gpu), bench, sanitize, plot; default: all four, in that order. A failed step does not stop the next ones;
# the exit code says whether one failed. --bundle: what pack_gpu.py wrote; without it the installed packages are used, and the
# native libraries of build_native.py are built here if nvcc is.
# Environment: PYTHON (python3), TEST_TIMEOUT, BENCH_TIMEOUT, SANITIZE_TIMEOUT in seconds (300, 500, 120 each tool).
set -u -o pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
python=${PYTHON:-python3}
bundle= out=$here/out
steps=()
while [ $# -gt 0 ]; do
  case $1 in
    --bundle) bundle=$(cd "${2:?--bundle needs a folder}" && pwd) || exit 2; shift 2 ;;
    --out) out=${2:?--out needs a folder}; shift 2 ;;
    test | bench | sanitize | plot) steps+=("$1"); shift ;;
    --) shift; break ;;
    -h | --help) sed -n '3,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "run_gpu.sh: unknown argument '$1'; steps are test, bench, sanitize, plot" >&2; exit 2 ;;
  esac
done
[ ${#steps[@]} -gt 0 ] || steps=(test bench sanitize plot)
mkdir -p "$out"
out=$(cd "$out" && pwd)
pytest=("$python" -m pytest "$root/test/kernels" -m gpu -q -p no:cacheprovider)
bench=("$python" "$here/kernels/bench_mla_tree_verify.py")
export PYTHONUNBUFFERED=1
if [ -n "$bundle" ]; then
  export PYTHONPATH=$bundle/site${PYTHONPATH:+:$PYTHONPATH}
  bench+=(--native "$bundle/native" --sglang-kernels "$bundle/sglang_kernels" --commit "$(cat "$bundle/COMMIT")")
elif [ ! -f "$here/build/native/libprobes.so" ]; then
  "$python" "$here/kernels/build_native.py" || echo "run_gpu.sh: some native libraries are missing; their arms will be reported as not available"
fi

failed=0
step() { # step NAME SECONDS COMMAND...
  local name=$1 seconds=$2 rc=0
  shift 2
  echo "== $name"
  timeout "$seconds" "$@" 2>&1 | tee "$out/$name.log" || rc=$?
  echo "== $name: exit code $rc after ${SECONDS} s in all"
  [ $rc = 0 ] || failed=1
}

# Every tool over the cases that between them take every path: tile edges, empty and ragged lists, pages, fp8, more than one
# mask word, more heads than one row tile, a large batch; and the row moves. Only our kernels are instrumented, and torch's
# cache of freed memory is off, so that an access past a tensor leaves its allocation.
cases="(float64_reference and (edges or empty-and-short or page-16 or bits-s_q-65 or fp8-scales or h_q-64 or batch-256))"
cases+=" or test_buffers_of_every_kind"
sanitize() {
  local tool only=()
  command -v compute-sanitizer >/dev/null || { echo "run_gpu.sh: no compute-sanitizer on PATH"; failed=1; return; }
  local option help
  help=$(compute-sanitizer --help 2>&1)
  for option in --kernel-regex --kernel-name; do   # the second is what current versions have
    [[ $help == *"$option"* ]] && only=("$option" kns=sgl_kernel_sm120)
  done
  for tool in memcheck racecheck initcheck synccheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "sanitize-$tool" "${SANITIZE_TIMEOUT:-120}" compute-sanitizer --tool "$tool" "${only[@]}" --error-exitcode 9 \
      "${pytest[@]}" -k "$cases"
  done
}

for s in "${steps[@]}"; do
  case $s in
    test) step test "${TEST_TIMEOUT:-300}" "${pytest[@]}" ;;
    bench) step bench "${BENCH_TIMEOUT:-500}" "${bench[@]}" --out "$out/mla_tree_verify.json" "$@" ;;
    sanitize) sanitize ;;
    plot) step plot 60 "$python" "$here/kernels/plot_mla_tree_verify.py" "$out/mla_tree_verify.json" --out "$out" ;;
  esac
done
exit $failed
