# SPDX-License-Identifier: Apache-2.0
"""KV slots under churn: the real allocators and the real prefix cache, no model."""
