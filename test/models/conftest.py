# SPDX-License-Identifier: Apache-2.0
"""Make the package ``training`` importable from the tests of this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
