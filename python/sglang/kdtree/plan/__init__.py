# SPDX-License-Identifier: Apache-2.0
"""Memory arithmetic for a model and a machine: weights, KV pool, buffers, headroom, launch command."""
