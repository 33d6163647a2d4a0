# SPDX-License-Identifier: Apache-2.0
"""Decode speed of one tensor-parallel rank of Kimi K2.6 against context, through the real Engine."""
