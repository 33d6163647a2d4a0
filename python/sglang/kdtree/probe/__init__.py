# SPDX-License-Identifier: Apache-2.0
"""Questions to a running server, or to what it recorded."""
