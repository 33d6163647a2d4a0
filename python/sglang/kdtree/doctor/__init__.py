# SPDX-License-Identifier: Apache-2.0
"""One screen that says whether this machine and this installation can serve, and what to do if not."""
