# SPDX-License-Identifier: Apache-2.0
"""MHA KV pool for devices without Triton."""

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class TorchMHATokenToKVPool(MHATokenToKVPool):
    """Moves KV rows by indexing; the parent would launch its Triton copier here."""

    def _init_kv_copy_and_warmup(self):
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True
