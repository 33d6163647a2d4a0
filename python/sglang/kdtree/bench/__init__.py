# SPDX-License-Identifier: Apache-2.0
"""Streaming measurements against a running server."""
