# SPDX-License-Identifier: Apache-2.0
"""What our files take from upstream, and what another release would leave of it.

An edit is signed, a file of ours is not: it may stand on a class whose method another release renames. Looked at are
the names that our files import from upstream, by their syntax trees; nothing is imported. A name is lost if nothing
binds it any more. A word is gone if our file says it, the imported class or function offered it at the pin as a method,
an attribute or an argument, and no longer says it at all.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

from .anchors import DEFINITIONS, bound_names, tree_hash
from .upstream import Wheel

PACKAGE = "sglang"


def compare(own: dict[str, Path], pinned: Wheel, newer: Wheel) -> tuple[list[str], list[str]]:
    """(what is lost or gone: work, symbols that only changed: to read), one line each"""
    work, changed = [], defaultdict(list)
    old, new = Index(pinned), Index(newer)
    for path, source in sorted(own.items()):
        if not path.endswith(".py"):
            continue
        tree = ast.parse(source.read_text(encoding="utf-8"))
        said = words(tree)
        for module, name in sorted(imports(tree)):
            if old.says_the_same(new, module, name) or not old.has(module, name):
                continue  # unchanged, or ours
            symbol = f"{module}.{name}" if name else module
            if not new.has(module, name):
                work.append(f"import lost    {path}: {symbol}")
                continue
            before, after = old.definition(module, name), new.definition(module, name)
            if before is None or after is None or tree_hash(before) == tree_hash(after):
                continue
            gone = sorted((offered(before) - words(after)) & said)
            if gone:
                work.append(f"words gone     {path}: {symbol} no longer says {', '.join(gone)}")
            else:
                changed[symbol].append(path)
    return work, [f"used, changed  {symbol}: {', '.join(paths)}" for symbol, paths in sorted(changed.items())]


class Index:
    """The modules of one release and what each binds at its top."""

    def __init__(self, wheel: Wheel):
        self.wheel = wheel
        self.bindings = cache(self._bindings)

    def path(self, module: str) -> str | None:
        base = module.replace(".", "/")
        return next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in self.wheel.names), None)

    def is_package(self, module: str) -> bool:
        return any(name.startswith(module.replace(".", "/") + "/") for name in self.wheel.names)

    def says_the_same(self, other: Index, module: str, name: str) -> bool:
        """Whether the module that binds the name has the same bytes in both."""
        path = self.path(module)
        if path is None or path not in other.wheel.names or self.path(f"{module}.{name}"):
            return False
        return self.wheel.read(path) == other.wheel.read(path)

    def has(self, module: str, name: str) -> bool:
        """Whether `from module import name` finds something; with no name: whether the module is there."""
        path = self.path(module)
        if path is None and not self.is_package(module):
            return False
        if not name or self.path(f"{module}.{name}") or self.is_package(f"{module}.{name}"):
            return True
        if path is None:
            return False
        found = self.bindings(path)
        return name in found or "*" in found or "__getattr__" in found

    def definition(self, module: str, name: str) -> ast.AST | None:
        """The class or function, where the module itself defines it."""
        path = self.path(module)
        node = self.bindings(path).get(name) if path and name else None
        return node if isinstance(node, DEFINITIONS) else None

    def _bindings(self, path: str) -> dict[str, ast.AST]:
        found: dict[str, ast.AST] = {}
        todo = list(ast.parse(self.wheel.read(path)).body)
        while todo:
            node = todo.pop(0)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    found[alias.asname or alias.name.partition(".")[0]] = node
            elif isinstance(node, DEFINITIONS) or bound_names(node):
                found |= dict.fromkeys(bound_names(node), node)
            else:  # if, try, with: what is in them is bound in the module, too
                todo += [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
        return found


def imports(tree: ast.AST) -> set[tuple[str, str]]:
    """(module, name) of every import from upstream's package; the name is empty for `import module`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names if alias.name.partition(".")[0] == PACKAGE}
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE and not node.level:
            found |= {(node.module, alias.name) for alias in node.names}
    return found


def words(tree: ast.AST) -> set[str]:
    """Attributes, arguments and definitions that a piece of code names; its local variables mean nothing elsewhere."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.keyword, ast.arg)):
            found.add(node.arg)
        elif isinstance(node, DEFINITIONS):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= set(bound_names(node))
    return found


def offered(definition: ast.AST) -> set[str]:
    """What others may use of a class or function: its methods, arguments, fields, and attributes of self."""
    found = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, DEFINITIONS) and node is not definition:
            found.add(node.name)
    for node in getattr(definition, "body", []):
        found |= set(bound_names(node))
    return found
