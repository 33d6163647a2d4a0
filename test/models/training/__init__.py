# SPDX-License-Identifier: Apache-2.0
"""Training, export and offline study of the small MLA target and its DFlash drafter."""
