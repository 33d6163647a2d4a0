# SPDX-License-Identifier: Apache-2.0
"""The operator's kit: ``python -m sglang.kdtree doctor | plan | bench | probe``."""
