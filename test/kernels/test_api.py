# SPDX-License-Identifier: Apache-2.0
"""What callers rely on besides results: schemas, messages, fake kernels, torch.compile, a CPU-only installation."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels.cases import Case, make_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

import sgl_kernel_sm120
from sgl_kernel_sm120 import MaskLayout, Status, _library

OPS = torch.ops.sgl_kernel_sm120
REPOSITORY = Path(__file__).parents[2]
CSRC = REPOSITORY / "sgl-kernel-sm120" / "csrc"

SCHEMAS = {
    "mla_tree_verify": "Tensor q, Tensor kv_cache, Tensor kv_indptr, Tensor kv_indices, Tensor draft_slots, "
    "Tensor tree_mask, Tensor mask_indptr, Tensor plan, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) workspace, "
    "Tensor(d!) status, int mask_layout, int page_size, float sm_scale, float logit_cap, float k_scale, float v_scale",
    "mla_tree_verify_plan": "Tensor kv_indptr, Tensor(a!) plan, int num_indices, int s_q, int h_q, "
    "bool has_draft_slots",
    "kv_move_all_layers": "Tensor(a!)[] kv_buffers, Tensor tgt, Tensor src",
    "ddtree_build": "Tensor root, Tensor ids, Tensor log_probs, Tensor(a!) tokens, Tensor(b!) parents, "
    "Tensor(c!) depth, Tensor(d!) first_child, Tensor(e!) next_sibling, Tensor(f!) visible, Tensor(g!) used, "
    "Tensor(h!) path_log_probs, float min_log_prob",
    "tree_accept": "Tensor tokens, Tensor parents, Tensor target_tokens, Tensor(a!) path, Tensor(b!) accept_len, "
    "Tensor(c!) out_tokens, Tensor(d!) bonus",
    "tree_count": "Tensor ids, Tensor log_probs, Tensor path_log_probs, Tensor used, Tensor accept_len, "
    "Tensor out_tokens, Tensor options, Tensor(a!) counts, int num_nodes",
    "pack_tree_mask": "Tensor visible, Tensor(a!) words",
}


def test_schemas_are_as_published():
    assert set(sgl_kernel_sm120.op_names()) == set(SCHEMAS)
    for name, arguments in SCHEMAS.items():
        assert str(getattr(OPS, name).default._schema) == f"sgl_kernel_sm120::{name}({arguments}) -> ()"


def test_public_names():
    for name in sgl_kernel_sm120.__all__:
        assert hasattr(sgl_kernel_sm120, name)


def test_cpp_and_python_agree_on_codes():
    text = (CSRC / "params.h").read_text()
    layouts = re.search(r"enum class MaskLayout.*?\{(.*?)\}", text)[1]
    assert dict(re.findall(r"k(\w+) = (\d)", layouts)) == {m.name.title(): str(m.value) for m in MaskLayout}
    bits = re.search(r"enum StatusBit.*?\{(.*?)\}", text)[1]
    assert dict(re.findall(r"k(\w+) = (\d)", bits)) == {s.name.title().replace("_", ""): str(s.value) for s in Status}


def test_cpp_functions_take_the_arguments_of_the_schemas():
    """The boxed call counts them at run time; here without a GPU."""
    registered = set(re.findall(r"implement<api::(\w+)>", (CSRC / "ops.cpp").read_text()))
    assert registered <= set(SCHEMAS)
    for name in registered:
        text = "\n".join(p.read_text() for p in (CSRC / "api").glob("*.h"))
        parameters = re.search(rf"inline void {name}\(([^)]*)\)", text)[1]
        names = [p.split()[-1].lstrip("&") for p in parameters.split(",")]
        assert names == [argument.split()[-1] for argument in SCHEMAS[name].split(", ")], name


def verify_inputs(**more):
    return make_inputs(Case("api", (20, 3), s_q=5, h_q=2, **more))


TOKENS, PARENTS = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int32)
Q = torch.zeros(2, 5, 2, 576, dtype=torch.bfloat16)
MISTAKES = {
    "q: expected 4 dimensions [b, s_q, h_q, 576], got bfloat16 [2, 5, 1152]": dict(q=Q.flatten(2)),
    "q: expected [b, s_q, h_q, 576] = [2, 5, 2, 576], got bfloat16 [2, 5, 2, 512]": dict(q=Q[..., :512]),
    "q: expected bfloat16 or float16 or float32 or float64, got int32": dict(q=Q.int()),
    "q: s_q: expected 1..128, got 129": dict(q=Q[:1, :1].expand(2, 129, 2, 576)),
    "q: h_q: expected 1..128, got 129": dict(q=Q[:, :, :1].expand(2, 5, 129, 576)),
    "q: b: expected 1..256, got 0": dict(q=Q[:0]),
    "q: expected stride 1 in the last dimension, got strides [5760, 1152, 576, 2]; call .contiguous()": dict(
        q=torch.zeros(2, 5, 2, 1152, dtype=torch.bfloat16)[..., ::2].as_strided((2, 5, 2, 576), (5760, 1152, 576, 2))
    ),
    "kv_cache: expected [num_slots, 576] = [9, 576], got bfloat16 [9, 512]": dict(
        kv_cache=torch.zeros(9, 512).bfloat16()
    ),
    "kv_cache: expected [num_slots, 1, 576] = [9, 1, 576], got bfloat16 [9, 2, 576]": dict(
        kv_cache=torch.zeros(9, 2, 576).bfloat16()
    ),
    "kv_cache: expected at least one slot": dict(kv_cache=torch.zeros(0, 576).bfloat16()),
    "kv_cache: expected bfloat16 or float16 or float32 or float64 or float8_e4m3fn, got uint8": dict(
        kv_cache=torch.zeros(9, 576, dtype=torch.uint8)
    ),
    "kv_indptr: expected [b + 1] = [3], got int64 [2]": dict(kv_indptr=torch.zeros(2, dtype=torch.int64)),
    "kv_indptr: expected int32 or int64, got float32": dict(kv_indptr=torch.zeros(3)),
    "kv_indices: expected int32 or int64, got int16": dict(kv_indices=torch.zeros(33, dtype=torch.int16)),
    "draft_slots: expected int64, got int32 [2, 5] on cpu; kv_indices and draft_slots share one dtype": dict(
        draft_slots=torch.zeros(2, 5, dtype=torch.int32)
    ),
    "draft_slots: expected [b, s_q] = [2, 5], got int64 [2, 4]": dict(draft_slots=torch.zeros(2, 4, dtype=torch.int64)),
    "tree_mask: expected bool or uint8, got int64": dict(tree_mask=torch.zeros(2, 5, 1, dtype=torch.int64)),
    "tree_mask: expected [b, s_q, s_q] = [2, 5, 5], got bool [3, 5, 5]": dict(tree_mask=torch.zeros(3, 5, 5).bool()),
    "tree_mask: expected int64, got bool [2, 5, 5] on cpu; make it with pack_tree_mask": dict(
        mask_layout=MaskLayout.BITS
    ),
    "tree_mask: expected None for MaskLayout.CAUSAL": dict(mask_layout=MaskLayout.CAUSAL),
    "mask_layout: expected 0..3, got 4": dict(mask_layout=4),
    "mask_indptr: expected None unless MaskLayout.FULL": dict(mask_indptr=torch.zeros(3, dtype=torch.int64)),
    "mask_indptr: expected int64, got int32": dict(mask_indptr=torch.zeros(3, dtype=torch.int32)),
    "page_size: expected a power of two in 1..64, got 48": dict(page_size=48),
    "page_size: expected a power of two in 1..64, got 128": dict(page_size=128),
    "page_size: expected a power of two in 1..64, got 0": dict(page_size=0),
    "logit_cap: expected 0 (none) or a positive number, got -1.0": dict(logit_cap=-1.0),
    "out: expected bfloat16, got float32 [2, 5, 2, 512] on cpu; out takes the dtype of q": dict(
        out=torch.zeros(2, 5, 2, 512)
    ),
    "out: expected [b, s_q, h_q, 512] = [2, 5, 2, 512], got bfloat16 [2, 5, 2, 576]": dict(out=Q.clone()),
    "out: expected a contiguous tensor, got strides": dict(out=Q.clone()[..., :512]),
    "lse: expected float32, got bfloat16": dict(lse=torch.zeros(2, 5, 2).bfloat16()),
    "lse: expected [b, s_q, h_q] = [2, 5, 2], got float32 [2, 2, 5]": dict(lse=torch.zeros(2, 2, 5)),
    "status: expected int32, got int64": dict(status=torch.zeros(1, dtype=torch.int64)),
    "status: expected [1] = [1], got int32 [2]": dict(status=torch.zeros(2, dtype=torch.int32)),
    "workspace: expected uint8, got float32": dict(workspace=torch.zeros(4)),
    "plan: expected int32, got int64": dict(plan=torch.zeros(4, dtype=torch.int64)),
    "kv_indptr: expected a tensor on cpu, got int32 [3] on meta; move it with .to('cpu')": dict(
        kv_indptr=torch.zeros(3, dtype=torch.int32, device="meta")
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_named(message):
    inputs = verify_inputs().changed(**MISTAKES[message])
    with pytest.raises(ValueError, match=re.escape("mla_tree_verify: " + message)):
        sgl_kernel_sm120.mla_tree_verify(**inputs.arguments)


def test_argument_error_is_what_both_devices_raise():
    assert issubclass(sgl_kernel_sm120.ArgumentError, RuntimeError)


def build_arguments(**changes):
    arguments = dict(
        root=torch.zeros(2, dtype=torch.int64),
        ids=torch.zeros(2, 3, 4, dtype=torch.int64),
        log_probs=torch.zeros(2, 3, 4),
        num_nodes=8,
    )
    return {**arguments, **changes}


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_nodes=0), "num_nodes: expected 1..128, got 0"),
        (dict(num_nodes=129), "num_nodes: expected 1..128, got 129"),
        (dict(num_paths=7), "num_paths: expected 8..128, got 7"),
        (dict(num_paths=129), "num_paths: expected 8..128, got 129"),
        (dict(log_probs=torch.zeros(2, 3, 4).bfloat16()), "log_probs: expected float32, got bfloat16"),
        (dict(log_probs=torch.zeros(2, 4, 3)), "log_probs: expected [b, D, K] = [2, 3, 4], got float32 [2, 4, 3]"),
        (dict(ids=torch.zeros(2, 3, 65).long(), log_probs=torch.zeros(2, 3, 65)), "ids: K: expected 1..64, got 65"),
        (dict(ids=torch.zeros(2, 32, 4).long(), log_probs=torch.zeros(2, 32, 4)), "ids: D: expected 0..31, got 32"),
        (dict(root=torch.zeros(3, dtype=torch.int64)), "root: expected [b] = [2], got int64 [3]"),
        (dict(root=torch.zeros(2)), "root: expected int64, got float32"),
    ],
)
def test_builder_mistakes_are_named(changes, message):
    with pytest.raises((ValueError, RuntimeError), match=re.escape("ddtree_build: " + message)):
        sgl_kernel_sm120.ddtree_build(**build_arguments(**changes))


def _pack(*shape, dtype=torch.bool):
    return lambda: sgl_kernel_sm120.pack_tree_mask(torch.zeros(shape, dtype=dtype))


def _accept(tokens=TOKENS, parents=PARENTS, targets=TOKENS, max_len=3):
    return lambda: sgl_kernel_sm120.tree_accept(tokens, parents, targets, max_len)


def _move(buffer, index_dtype=torch.int64):
    index = torch.zeros(2, dtype=index_dtype)
    return lambda: sgl_kernel_sm120.kv_move_all_layers([buffer], index, index)


OTHER_MISTAKES = {
    "tree_accept: max_len: expected 1..128, got 0": _accept(max_len=0),
    "tree_accept: parents: expected int32, got int64": _accept(parents=TOKENS),
    "tree_accept: target_tokens: expected [b, N] = [2, 5], got int64 [1, 5]": _accept(targets=TOKENS[:1]),
    "pack_tree_mask: visible: expected [b, N, N] = [1, 4, 4], got bool [1, 4, 5]": _pack(1, 4, 5),
    "pack_tree_mask: visible: N: expected 1..128, got 129": _pack(1, 129, 129),
    "pack_tree_mask: visible: expected bool or uint8, got float32": _pack(1, 4, 4, dtype=torch.float32),
    "unpack_tree_mask: words: expected [b, N, ceil(N / 64)] = [1, 65, 2], got int64 [1, 65, 1]": (
        lambda: sgl_kernel_sm120.unpack_tree_mask(torch.zeros(1, 65, 1, dtype=torch.int64), 65)
    ),
    "kv_move_all_layers: tgt: expected int64, got float32": _move(torch.zeros(4, 4), torch.float32),
    "kv_move_all_layers: kv_buffers[0]: expected at least 2 dimensions [slots, ...]": _move(torch.zeros(4)),
    "kv_move_all_layers: kv_buffers[0]: expected rows that are contiguous inside": _move(torch.zeros(4, 4).T),
}


@pytest.mark.parametrize("message", OTHER_MISTAKES)
def test_other_mistakes_are_named(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        OTHER_MISTAKES[message]()


def op_samples():
    inputs = verify_inputs().arguments
    absent = torch.empty(0, dtype=torch.int64)
    outputs = [torch.empty(2, 5, 2, 512, dtype=torch.bfloat16), torch.empty(2, 5, 2), torch.empty(0, dtype=torch.uint8)]
    lists = [inputs[k] for k in ("q", "kv_cache", "kv_indptr", "kv_indices")]
    tree = sgl_kernel_sm120.ddtree_build(**build_arguments())
    build = build_arguments()
    del build["num_nodes"]
    accepted = sgl_kernel_sm120.tree_accept(tree.tokens, tree.parents, tree.tokens, 4)
    plan = torch.empty(0, dtype=torch.int32)
    status = torch.zeros(1, dtype=torch.int32)
    scalars = [int(MaskLayout.QLEN), 1, 0.1, 0.0, 1.0, 1.0]
    return {
        "mla_tree_verify": [*lists, absent, inputs["tree_mask"], absent, plan, *outputs, status, *scalars],
        "mla_tree_verify_plan": [inputs["kv_indptr"], plan, 33, 5, 2, False],
        "kv_move_all_layers": [[torch.rand(6, 4), torch.rand(6, 1, 3)], torch.tensor([1, 2]), torch.tensor([0, 1])],
        "ddtree_build": [*build.values(), *(t.clone() for t in tree), -5.0],
        "tree_accept": [tree.tokens, tree.parents, tree.tokens.clone(), *(t.clone() for t in accepted)],
        "tree_count": [
            build["ids"],
            build["log_probs"],
            tree.path_log_probs,
            tree.used,
            accepted.accept_len,
            accepted.out_tokens,
            torch.tensor([-3, 2, 8], dtype=torch.int32),
            torch.empty(2, 9, dtype=torch.int32),
            8,
        ],
        "pack_tree_mask": [tree.visible, torch.empty(2, 8, 1, dtype=torch.int64)],
    }


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize(
    "check", ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
)
def test_opcheck(name, check):
    torch.library.opcheck(getattr(OPS, name).default, tuple(op_samples()[name]), test_utils=check)


@pytest.mark.parametrize("name", SCHEMAS)
def test_fake_kernels_check_shapes_and_touch_no_data(name):
    sample = op_samples()[name]
    with FakeTensorMode() as mode:
        fake = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, sample)
        getattr(OPS, name).default(*fake)
        fake[0] = [fake[0][0][0, :]] if isinstance(fake[0], list) else fake[0][None].expand(3, *fake[0].shape)
        with pytest.raises(ValueError, match=f"{name}: "):
            getattr(OPS, name).default(*fake)


def test_compile_fullgraph():
    inputs = verify_inputs()

    def step(q, visible):
        words = sgl_kernel_sm120.pack_tree_mask(visible)
        more = {**inputs.arguments, "q": q, "tree_mask": words, "mask_layout": MaskLayout.BITS}
        return sgl_kernel_sm120.mla_tree_verify(**more) + 1

    q = inputs.arguments["q"]
    want = step(q, inputs.visible)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, inputs.visible)
    assert torch.equal(got, want)


def test_compiled_tree_step():
    def step(root, ids, log_probs, targets):
        tree = sgl_kernel_sm120.ddtree_build(root, ids, log_probs, 8)
        return sgl_kernel_sm120.tree_accept(tree.tokens, tree.parents, targets, 4)

    arguments = [
        torch.tensor([1, 2]),
        torch.arange(24).view(2, 3, 4),
        -torch.arange(24.0).view(2, 3, 4),
        torch.zeros(2, 8).long(),
    ]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*arguments), step(*arguments), strict=True):
        assert torch.equal(got, want)


def test_inputs_are_not_written():
    inputs = verify_inputs()
    before = {k: v.clone() for k, v in inputs.arguments.items() if isinstance(v, torch.Tensor)}
    sgl_kernel_sm120.mla_tree_verify(**inputs.arguments)
    for name, tensor in before.items():
        same = tensor.view(torch.uint8) if tensor.dtype.is_floating_point else tensor
        now = inputs.arguments[name]
        assert torch.equal(same, now.view(torch.uint8) if now.dtype.is_floating_point else now), name


def test_out_is_returned_and_written():
    inputs = verify_inputs()
    out = torch.full((2, 5, 2, 512), float("nan"), dtype=torch.bfloat16)
    assert sgl_kernel_sm120.mla_tree_verify(**inputs.arguments, out=out) is out
    assert torch.isfinite(out).all()


def test_plan_and_workspace_are_empty_on_the_cpu():
    plan = sgl_kernel_sm120.mla_tree_verify_plan(torch.tensor([0, 3]), 3, s_q=2, h_q=8)
    assert plan.numel() == 0 and plan.dtype == torch.int32
    assert sgl_kernel_sm120.mla_tree_verify_workspace_bytes(1, 9, 8, device="cpu") == 0


@pytest.mark.parametrize("library, reason", [(True, "it has no CUDA kernel"), (False, "has the CPU ops only")])
def test_an_op_without_a_cuda_kernel_says_so(monkeypatch, tmp_path, library, reason):
    """No silent torch path on a GPU. Fake CUDA tensors need none."""
    path = tmp_path / "library.so"
    if library:
        path.touch()
    monkeypatch.setattr(_library, "LIBRARY_PATH", path)
    monkeypatch.setattr(_library, "has_cuda_kernel", lambda name: False)
    with FakeTensorMode():
        root = torch.empty(2, dtype=torch.int64, device="cuda")
        nodes = torch.empty(2, 3, dtype=torch.int64, device="cuda")
        cube = torch.empty(2, 3, 3, dtype=torch.bool, device="cuda")
        q = torch.empty(2, 3, 8, 576, dtype=torch.bfloat16, device="cuda")
        calls = {
            "mla_tree_verify": lambda: sgl_kernel_sm120.mla_tree_verify(q, q, root, root, sm_scale=1.0),
            "mla_tree_verify_plan": lambda: sgl_kernel_sm120.mla_tree_verify_plan(root, 5, s_q=1, h_q=1),
            "kv_move_all_layers": lambda: sgl_kernel_sm120.kv_move_all_layers([nodes], root, root),
            "ddtree_build": lambda: sgl_kernel_sm120.ddtree_build(root, cube, cube, 4),
            "tree_accept": lambda: sgl_kernel_sm120.tree_accept(nodes, nodes, nodes, 1),
            "tree_count": lambda: sgl_kernel_sm120.tree_count(None, cube, cube, None, 1, root),
            "pack_tree_mask": lambda: sgl_kernel_sm120.pack_tree_mask(cube),
        }
        assert set(calls) == set(SCHEMAS)
        for name, call in calls.items():
            with pytest.raises(
                NotImplementedError, match=f"sgl_kernel_sm120::{name}: expected CPU tensors, got cuda.*{reason}"
            ):
                call()


def test_build_info_is_consistent():
    info = sgl_kernel_sm120.build_info()
    assert info["ops"] == list(sgl_kernel_sm120.op_names())
    assert set(info["cuda_ops"]) <= set(info["ops"])
    assert bool(info["library"]) == bool(info["archs"]) == bool(info["nvcc"]) == bool(info["cuda_ops"])


def test_import_is_light():
    """The scheduler imports this: nothing beside torch and the standard library, and no GPU is opened."""
    code = (
        "import sys, torch; before = set(sys.modules); import sgl_kernel_sm120; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names; "
        "print(*sorted(new), torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sgl_kernel_sm120", "False"]


def test_import_without_the_library(tmp_path):
    """The CPU-only installation: the same package without its .so."""
    package = tmp_path / "sgl_kernel_sm120"
    package.mkdir()
    for source in Path(sgl_kernel_sm120.__file__).parent.glob("*.py"):
        (package / source.name).write_bytes(source.read_bytes())
    code = (
        "import torch, sgl_kernel_sm120 as k; "
        "assert k.cuda_available_ops() == () and k.build_info()['library'] is None; "
        "print(k.pack_tree_mask(torch.ones(1, 2, 2, dtype=torch.bool)).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path), "PATH": ""}
    )
    assert done.stdout.strip() == "[[[3], [3]]]", done.stderr


needs_library = pytest.mark.skipif(not sgl_kernel_sm120.build_info()["library"], reason="needs the compiled library")


@needs_library
@pytest.mark.parametrize("name", sgl_kernel_sm120.cuda_available_ops())
def test_cuda_kernel_refuses_cpu_tensors(name):
    """The CUDA implementation, called on CPU tensors: the argument check, not a crash."""
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match=rf"{name}: \w+: expected a CUDA tensor, got .* not on a CUDA device"):
        getattr(OPS, name).default.redispatch(cuda, *op_samples()[name])


@needs_library
@pytest.mark.parametrize("name", ["archs", "nvcc_version"])
def test_library_exports_plain_c(name):
    info = sgl_kernel_sm120.build_info()
    assert all(re.fullmatch(r"\d+[af]?", arch) for arch in info["archs"])
    assert re.fullmatch(r"13\.\d+\.\d+", info["nvcc"])
