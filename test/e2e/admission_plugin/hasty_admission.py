# SPDX-License-Identifier: Apache-2.0
"""Test aid, loaded by the server's processes: requests are admitted as if they were to answer 8 tokens, so that a small
pool runs full. SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION=8 says the same, but is read while sglang is imported, and servers
of tests are forked from a process that has done so."""


def install():
    from sglang.srt.managers import schedule_policy

    schedule_policy.CLIP_MAX_NEW_TOKENS = 8
