# SPDX-License-Identifier: Apache-2.0
"""A server on a CPU in plain torch: no sgl_kernel, no Triton launch.

Chosen where no accelerator is found, and by ``--device cpu`` on a machine that
has a CUDA GPU. The CPU engine (SGLANG_USE_CPU_ENGINE=1) goes first.
"""

from __future__ import annotations

import logging
import os
import pathlib
import sys
from typing import Optional, Sequence

import torch

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

logger = logging.getLogger(__name__)

_SPEC_ALGORITHMS = ("DFLASH", "DDTREE")
_DRAFT_BACKENDS = ("torch_reference", "triton")


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    # The enum's CPU member stands for the sgl_kernel engine; OOT is what is
    # asked for where a platform speaks for itself.
    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities(
        supports_triton=os.environ.get("TRITON_INTERPRET") == "1"
    )

    def get_device(self, device_id: int = 0) -> str:
        # A name: ServerArgs splits the device of a server that got no --device.
        return "cpu"

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def apply_server_args_defaults(self, server_args) -> None:
        refuse_expert_recorder(server_args)
        refuse_sparse_attention(server_args)
        if server_args.enable_deterministic_inference:
            logger.warning(
                "--enable-deterministic-inference on a CPU: requests sample by "
                "their seed, but matrix products are not batch-invariant."
            )

    def init_backend(self) -> None:
        # torch.compile decorators in model and sampler code would call a C++
        # compiler on the first request.
        torch.compiler.set_stance("force_eager")

    def get_default_attention_backend(self) -> str:
        return "torch_reference"

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return "torch_reference"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in _SPEC_ALGORITHMS

    def supports_speculative_draft_attention_backend(
        self, algorithm: str, backend: str
    ) -> bool:
        return backend in _DRAFT_BACKENDS

    def get_speculative_cache_locs_fn(self):
        from sglang.srt.mem_cache.torch_slots import gather_extend_slots

        return gather_extend_slots

    def get_kv_pool_cls(self, *, kind):
        if kind != "mha" or self.capabilities.supports_triton:
            return None
        from sglang.srt.mem_cache.torch_kv_pool import TorchMHATokenToKVPool

        return TorchMHATokenToKVPool

    def get_compile_backend(self, mode: Optional[str] = None) -> str:
        return "eager"

    def post_load_model(self, model: torch.nn.Module) -> None:
        # The bfloat16 fast path of a DFlash draft's attention is a Triton kernel.
        for module in model.modules():
            if getattr(module, "use_table_qk_norm_rope", False):
                module.use_table_qk_norm_rope = False


def discover() -> dict[str, str]:
    """{name: class} if this process runs on a CPU in plain torch, else {}.

    Called while the platform is resolved, which is the first thing that
    ``sglang.srt.utils`` does: no module has cached ``is_cuda()`` yet, so hiding
    the GPUs here holds for the whole process, and its children inherit it.
    """
    from sglang.srt import platforms
    from sglang.srt.platforms.torchvision_ops import declare_missing_operators

    declare_missing_operators()
    if platforms._is_cpu_available():
        return {}
    if cpu_is_chosen(sys.argv, sys.orig_argv):
        # Before any probe: the first one makes CUDA read the environment.
        _hide_cuda_devices()
    if _accelerator_found(platforms):
        return {}
    return {"torch_cpu": f"{__name__}.{TorchCpuPlatform.__name__}"}


def cpu_is_chosen(argv: Sequence[str], orig_argv: Sequence[str]) -> bool:
    """Whether this is a server's own command line and it says --device cpu."""
    program = pathlib.Path(argv[0]).name if argv else ""
    runs_sglang = program == "sglang" or any(
        flag == "-m" and module.partition(".")[0] == "sglang"
        for flag, module in zip(orig_argv, orig_argv[1:])
    )
    if not runs_sglang:
        return False
    device = None
    for here, following in zip(argv, [*argv[1:], ""]):
        if here == "--device":
            device = following
        elif here.startswith("--device="):
            device = here.partition("=")[2]
    return device == "cpu"


def _accelerator_found(platforms) -> bool:
    return (
        platforms._is_sail_available()
        or platforms._is_cuda_available()
        or platforms._is_npu_available()
        or platforms._is_rocm_available()
        or platforms._is_xpu_available()
        or platforms._is_musa_available()
        or platforms._is_mps_available()
    )


def _hide_cuda_devices() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if torch.cuda.is_available():
        raise RuntimeError(
            "--device cpu: CUDA is already open in this process, so its GPUs "
            "cannot be hidden any more. Start with CUDA_VISIBLE_DEVICES= (empty)."
        )


def refuse_expert_recorder(server_args) -> None:
    """The recorder asks the device module about graph capture in every routed
    layer; torch.cpu has no answer, and the server would die at its first request."""
    if server_args.expert_distribution_recorder_mode is None:
        return
    if not hasattr(torch.cpu, "is_current_stream_capturing"):
        raise ValueError(
            "--expert-distribution-recorder-mode does not run on the torch CPU platform: "
            f"torch {torch.__version__} has no torch.cpu.is_current_stream_capturing. "
            "Leave it out, or serve on a GPU."
        )


def refuse_sparse_attention(server_args) -> None:
    """Refuse a model whose attention selects keys (DSA): no backend of this platform
    has an indexer, and the next thing that is asked is a CUDA device."""
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig.from_server_args(server_args)
    if getattr(config, "index_head_dim", None) is not None:
        raise ValueError(
            "The torch CPU platform (attention backends kdtree_sm120 and "
            "torch_reference) attends to every key, and the sparse attention (DSA) of "
            f"{config.hf_config.architectures[0]} selects some. Serve this model on a "
            "GPU."
        )


def require_torch_cpu(user: str) -> None:
    """Refuse a CPU run on another platform, where half of the code would still
    take its CUDA paths: Engine(device="cpu") or a config file, on a GPU machine."""
    from sglang.srt.platforms import current_platform

    if not isinstance(current_platform, TorchCpuPlatform):
        raise ValueError(
            f"{user} on device cpu needs the torch CPU platform, but this process "
            f"runs on {type(current_platform).__name__}. Pass --device cpu on the "
            "command line of the server, or start with CUDA_VISIBLE_DEVICES= (empty)."
        )
