# SPDX-License-Identifier: Apache-2.0
"""Attention one query, one head, one key at a time, in Python floats; and a pool and a layer to run backends on."""

import math
from types import SimpleNamespace

import torch

from sglang.srt.layers.radix_attention import AttentionType


def naive_attention(q, keys, values, sees, *, scaling, logit_cap=0.0):
    """q [n, h, d], keys [m, h_kv, d], values [m, h_kv, d_v]; sees(i, j) -> bool. -> [n, h, d_v]"""
    n, num_heads, _ = q.shape
    group = num_heads // keys.shape[1]
    out = torch.zeros(n, num_heads, values.shape[2], dtype=torch.float64)
    for i in range(n):
        for h in range(num_heads):
            scores = {}
            for j in range(keys.shape[0]):
                if sees(i, j):
                    score = scaling * float(q[i, h].double() @ keys[j, h // group].double())
                    scores[j] = logit_cap * math.tanh(score / logit_cap) if logit_cap else score
            if not scores:
                continue
            top = max(scores.values())
            total = sum(math.exp(score - top) for score in scores.values())
            for j, score in scores.items():
                out[i, h] += math.exp(score - top) / total * values[j, h // group].double()
    return out


def write_rows(buffer, slots, rows):
    rows = rows.to(buffer.dtype)
    if buffer.dtype.itemsize == 1:  # fp8 is not assigned by index on every device; bytes are
        buffer, rows = buffer.view(torch.uint8), rows.view(torch.uint8)
    buffer[slots] = rows


class Pool:
    """KV rows of one layer; slots that nobody owns are NaN."""

    def __init__(self, num_slots, num_kv_heads, head_dim, v_head_dim, *, mla=False, dtype=torch.float32):
        self.start_layer, self.layer_num = 0, 1
        self.keys = torch.full((num_slots, num_kv_heads, head_dim), math.nan, dtype=dtype)
        self.values = (
            self.keys[..., :v_head_dim]
            if mla
            else torch.full((num_slots, num_kv_heads, v_head_dim), math.nan, dtype=dtype)
        )
        self.mla = mla

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values

    def set_kv_buffer(self, layer, loc_info, k, v):
        write_rows(self.keys, loc_info.loc, k)
        if not self.mla:
            write_rows(self.values, loc_info.loc, v)


def make_layer(num_heads, num_kv_heads, head_dim, v_head_dim, **fields):
    layer = dict(
        layer_id=0, tp_q_head_num=num_heads, tp_k_head_num=num_kv_heads, tp_v_head_num=num_kv_heads,
        qk_head_dim=head_dim, head_dim=head_dim, v_head_dim=v_head_dim, scaling=head_dim**-0.5, logit_cap=0.0,
        logit_capping_method="tanh", sliding_window_size=-1, attn_type=AttentionType.DECODER, k_scale=None,
        v_scale=None, k_scale_float=None, v_scale_float=None, is_cross_attention=False, xai_temperature_len=-1,
    )  # fmt: skip
    return SimpleNamespace(**(layer | fields))
