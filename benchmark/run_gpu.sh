#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Everything that only a GPU can show, in one command, with or without a network. Everything lands in one folder.
#
#   bash benchmark/run_gpu.sh [--site DIR[:DIR]] [--bundle DIR] [--out DIR] [STEP...] [-- ARGUMENTS OF THE BENCHMARK]
#
# STEP, in this order by default (with --bundle and no --site: test, bench, ddtree, kv_layout, sanitize, plot):
#   test       tests of the kernels (pytest -m gpu test/kernels)
#   backend    tests of the attention backend: captured steps in real CUDA graphs, and what other parts mark as gpu
#   kit        the operator's verbs on the GPU and on a server of the small model there: test/kit  -> kit/*.json, logs, plots
#   e2e        backend_e2e.py: the real Engine, upstream's Triton against kdtree_sm120          -> backend_e2e.json
#   acceptance the small model in Engines side by side: chain, trees, auto; tokens a step and a second -> acceptance.json, plot
#   churn      backend_churn.py: a server under 64 clients for minutes                           -> backend_churn.json
#   one_rank   one rank of Kimi K2.6, step time against context                                 -> one_rank.json, plots
#   bench      every kernel of this job side by side                                            -> mla_tree_verify.json
#   ddtree     the kernels that a draft tree adds to a step                                      -> ddtree.json
#   kv_layout  the verify kernel over slots in runs and anywhere, the allocator's sorts, the move -> kv_layout.json
#   sanitize   compute-sanitizer over the kernels' tests
#   plot       plots of bench
# and by its name alone, because it needs two GPUs of one host:
#   two_ranks  tensor parallelism, everything about it side by side                     -> equal, churn, steps, moe.json
# A failed step does not stop the next ones; the exit code says whether one failed. What comes after -- goes to bench, or to
# the one step that was named.
# The environment is an installed one (pip install ./python[cuda] and ./sgl-kernel-sm120), or a tree that is laid out like
# site-packages and unpacked on an offline host: --site. --bundle: what pack_gpu.py wrote, for its steps above; without it
# the native libraries of build_native.py are built here if nvcc is.
# Environment: PYTHON (python3), COMMIT where there is no git; seconds a step: TEST_TIMEOUT, BACKEND_TIMEOUT, KIT_TIMEOUT,
# E2E_TIMEOUT, ACCEPTANCE_TIMEOUT, CHURN_TIMEOUT, ONE_RANK_TIMEOUT, BENCH_TIMEOUT, DDTREE_TIMEOUT, KV_LAYOUT_TIMEOUT,
# SANITIZE_TIMEOUT, TWO_RANKS_TIMEOUT (300, 300, 300, 900, 300, 600, 1800, 500, 300, 600, 120 each tool, 480).
set -u -o pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
python=${PYTHON:-python3}
bundle= site= out=$here/out
all=(test backend kit e2e acceptance churn one_rank bench ddtree kv_layout sanitize plot)
steps=()
while [ $# -gt 0 ]; do
  case $1 in
    --bundle) bundle=$(cd "${2:?--bundle needs a folder}" && pwd) || exit 2; shift 2 ;;
    --site) site=${2:?--site needs a folder}; shift 2 ;;
    --out) out=${2:?--out needs a folder}; shift 2 ;;
    test | backend | kit | e2e | acceptance | churn | one_rank | bench | ddtree | kv_layout | sanitize | plot | two_ranks) steps+=("$1"); shift ;;
    --) shift; break ;;
    -h | --help) sed -n '3,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "run_gpu.sh: unknown argument '$1'; steps are ${all[*]} two_ranks" >&2; exit 2 ;;
  esac
done
bench_args=("$@") own_args=()
if [ ${#steps[@]} = 1 ] && [ "${steps[0]}" != bench ]; then own_args=("$@") bench_args=(); fi
if [ ${#steps[@]} = 0 ]; then
  if [ -n "$bundle" ] && [ -z "$site" ]; then steps=(test bench ddtree kv_layout sanitize plot); else steps=("${all[@]}"); fi
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
pytest=("$python" -m pytest "$root/test/kernels" -m gpu -q -p no:cacheprovider)
bench=("$python" "$here/kernels/bench_mla_tree_verify.py")
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
if [ -n "$site" ]; then
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
  # A process of a server that takes another interpreter than this one would lose the tree's torch.
  folder=$(dirname "$(command -v "$python")") && export PATH=$folder:$PATH
fi
if [ -n "$bundle" ]; then COMMIT=$(cat "$bundle/COMMIT"); fi
commit=()
[ -z "${COMMIT:-}" ] || commit=(--commit "$COMMIT")
if [ -n "$bundle" ]; then
  export PYTHONPATH=$bundle/site${PYTHONPATH:+:$PYTHONPATH}
  bench+=(--native "$bundle/native" --sglang-kernels "$bundle/sglang_kernels")
elif [[ " ${steps[*]} " == *" bench "* ]] && [ ! -f "$here/build/native/libprobes.so" ]; then
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
    backend) step backend "${BACKEND_TIMEOUT:-300}" "$python" -m pytest "$root/test/srt" "$root/test/e2e" -m gpu -q -p no:cacheprovider ;;
    kit) step kit "${KIT_TIMEOUT:-300}" env KIT_OUT="$out/kit" "$python" -m pytest "$root/test/kit" -m gpu -q -p no:cacheprovider ;;
    e2e) step e2e "${E2E_TIMEOUT:-900}" "$python" "$here/backend_e2e.py" --out "$out/backend_e2e.json" --logs "$out/e2e" \
      "${commit[@]}" "${own_args[@]}" ;;
    acceptance) step acceptance "${ACCEPTANCE_TIMEOUT:-300}" env PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" "$python" \
      -m acceptance --engine --out "$out/acceptance.json" --logs "$out/acceptance" "${commit[@]}" "${own_args[@]}" ;;
    churn) step churn "${CHURN_TIMEOUT:-600}" "$python" "$here/backend_churn.py" --out "$out/backend_churn.json" \
      "${commit[@]}" "${own_args[@]}" ;;
    one_rank)
      step one_rank "${ONE_RANK_TIMEOUT:-1800}" env PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" "$python" -m one_rank --profile \
        --out "$out/one_rank.json" --logs "$out/one_rank" "${commit[@]}" "${own_args[@]}"
      step one_rank_plot 60 env PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" "$python" -m one_rank.plot "$out/one_rank.json" ;;
    two_ranks) step two_ranks "${TWO_RANKS_TIMEOUT:-480}" env PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" "$python" \
      -m two_ranks --out "$out" --logs "$out/two_ranks" "${commit[@]}" "${own_args[@]}" ;;
    test) step test "${TEST_TIMEOUT:-300}" "${pytest[@]}" ;;
    bench) step bench "${BENCH_TIMEOUT:-500}" "${bench[@]}" --out "$out/mla_tree_verify.json" "${commit[@]}" \
      "${bench_args[@]}" ;;
    ddtree) step ddtree "${DDTREE_TIMEOUT:-300}" "$python" "$here/kernels/bench_ddtree.py" --out "$out/ddtree.json" \
      "${commit[@]}" "${own_args[@]}" ;;
    kv_layout) step kv_layout "${KV_LAYOUT_TIMEOUT:-600}" "$python" "$here/bench_kv_layout.py" --out "$out/kv_layout.json" \
      "${commit[@]}" "${own_args[@]}" ;;
    sanitize) sanitize ;;
    plot) step plot 60 "$python" "$here/kernels/plot_mla_tree_verify.py" "$out/mla_tree_verify.json" --out "$out" ;;
  esac
done
exit $failed
