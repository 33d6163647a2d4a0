# SPDX-License-Identifier: Apache-2.0
"""One exception: the fork cannot be made, with every reason found, and nothing was written."""


class Refused(Exception):
    def __init__(self, *reasons: str):
        super().__init__("\n".join(reasons))
        self.reasons = list(reasons)
