# SPDX-License-Identifier: Apache-2.0
"""Kernels for tree-verified decoding of MLA models on sm_120. Importing registers torch.ops.sgl_kernel_sm120.*

Without the compiled library the CPU ops work and cuda_available_ops() is empty.
"""

from ._check import ArgumentError
from ._library import build_info, cuda_available_ops, load_compiled_library, op_names
from ._version import __version__
from .attention import mla_tree_verify, mla_tree_verify_plan, mla_tree_verify_workspace_bytes
from .kvcache import kv_move_all_layers
from .reference import MaskLayout, Status, mla_tree_verify_reference
from .tree import (
    Acceptance,
    DraftTree,
    ddtree_build,
    pack_tree_mask,
    tree_accept,
    tree_count,
    tree_links,
    tree_visibility,
    unpack_tree_mask,
)

__all__ = [
    "Acceptance",
    "ArgumentError",
    "DraftTree",
    "MaskLayout",
    "Status",
    "__version__",
    "build_info",
    "cuda_available_ops",
    "ddtree_build",
    "kv_move_all_layers",
    "mla_tree_verify",
    "mla_tree_verify_plan",
    "mla_tree_verify_reference",
    "mla_tree_verify_workspace_bytes",
    "op_names",
    "pack_tree_mask",
    "tree_accept",
    "tree_count",
    "tree_links",
    "tree_visibility",
    "unpack_tree_mask",
]

load_compiled_library()
