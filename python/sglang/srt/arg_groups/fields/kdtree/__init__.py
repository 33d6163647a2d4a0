# SPDX-License-Identifier: Apache-2.0
"""Config fields of kdtree_sm120, DDTREE and --kv-defrag, and their names in registries.

``server_args`` imports this package while it collects its fields, and every process
of a server imports ``server_args``: a name registered here is known everywhere, and
a failure to register stops the process.

Each module here belongs to one feature: ``FIELDS`` is its struct of flags, and
``REGISTERS`` names the modules that register something by being imported.
"""

from importlib import import_module
from pkgutil import iter_modules

_FEATURES = [
    import_module(f"{__name__}.{module.name}")
    for module in sorted(iter_modules(__path__), key=lambda module: module.name)
]
KDTREE_NAMESPACES = [feature.FIELDS for feature in _FEATURES]

# Last, when the list is there: what registers is on the other side of the tree and
# may be what imports this package first.
for _feature in _FEATURES:
    for _module in _feature.REGISTERS:
        import_module(_module)
