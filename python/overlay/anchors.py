# SPDX-License-Identifier: Apache-2.0
"""Where an edit goes: a symbol of the module, and one anchor inside the symbol's own scope.

Anchors name structure and are compared as syntax trees, so upstream's formatting and comments are free to change.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import Refused

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
ANCHOR_KINDS = ("assign", "call", "return", "if", "import", "expr")
# Fields that say nothing about meaning, or that only some Python versions have.
SILENT_FIELDS = {"ctx", "kind", "type_comment", "type_params", "type_ignores"}


@dataclass(frozen=True)
class Found:
    """What an anchor names: the statement, and the expression in it that `replace` would replace."""

    statement: ast.stmt
    expression: ast.expr | None
    parent: ast.AST | None = None  # the node right above the expression


def canonical(node: object) -> object:
    """A syntax tree as nested tuples: equal for equal code, whatever the formatting and the Python version."""
    if isinstance(node, ast.AST):
        fields = []
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(node, (*DEFINITIONS, ast.Module)) and docstring_of(node):
                value = value[1:]
            if isinstance(node, ast.JoinedStr):  # Python 3.12 puts empty texts into f-strings
                value = [part for part in value if not (isinstance(part, ast.Constant) and part.value == "")]
            value = canonical(value)
            if name not in SILENT_FIELDS and value not in (None, ()):
                fields.append((name, value))
        return (type(node).__name__, *fields)
    if isinstance(node, list):
        return tuple(canonical(item) for item in node)
    return None if node is None else f"{type(node).__name__} {node!r}"


def docstring_of(node: ast.AST) -> ast.Expr | None:
    first = node.body[0] if node.body else None
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return first if is_text else None


def tree_hash(node: ast.AST) -> str:
    return hashlib.sha256(repr(canonical(node)).encode()).hexdigest()[:12]


def own_nodes(scope: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, ast.stmt | None]]:
    """(node, parent, statement) of a scope; a nested definition is one node, its inside is a scope of its own."""
    plain_statement = isinstance(scope, ast.stmt) and not isinstance(scope, DEFINITIONS)
    todo = deque([(scope, None, None)] if plain_statement else [(child, scope, None) for child in children(scope)])
    while todo:
        node, parent, statement = todo.popleft()
        statement = node if isinstance(node, ast.stmt) else statement
        yield node, parent, statement
        if not isinstance(node, DEFINITIONS):
            todo.extendleft((child, node, statement) for child in reversed(children(node)))


def children(node: ast.AST) -> list[ast.AST]:
    return list(node.body) if isinstance(node, (*DEFINITIONS, ast.Module)) else list(ast.iter_child_nodes(node))


def targets_of(statement: ast.AST) -> list[str]:
    """The names that an assignment binds, as written: 'x', 'self.x', each name of a tuple."""
    if isinstance(statement, ast.Assign):
        todo = list(statement.targets)
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        todo = [statement.target]
    else:
        return []
    names = []
    while todo:
        target = todo.pop(0)
        if isinstance(target, (ast.Tuple, ast.List)):
            todo = list(target.elts) + todo
        else:
            names.append(ast.unparse(target))
    return names


def bound_names(node: ast.AST) -> list[str]:
    return [node.name] if isinstance(node, DEFINITIONS) else targets_of(node)


def find_symbol(tree: ast.Module, qualname: str) -> ast.AST:
    """The one node bound to a dotted name; "" is the module itself."""
    scope: ast.AST = tree
    for part in qualname.split(".") if qualname else []:
        hits, seen = [], set()
        for node, _, _ in own_nodes(scope):
            names = bound_names(node)
            seen.update(names)
            if part in names:
                hits.append(node)
        if not hits:
            near = difflib.get_close_matches(part, sorted(seen), n=3)
            hint = f"; did upstream rename it to {' or '.join(near)}?" if near else ""
            raise Refused(f"symbol {qualname!r} is gone: no {part!r} there{hint}")
        if len(hits) > 1:
            raise Refused(f"symbol {qualname!r} is bound {len(hits)} times ({lines_of(hits)}): name one that is unique")
        scope = hits[0]
    return scope


def lines_of(nodes: list[ast.AST]) -> str:
    return "lines " + ", ".join(str(node.lineno) for node in nodes)


def find_anchor(scope: ast.AST, anchor: dict[str, str]) -> Found:
    """The one node that the anchor names, or a refusal that says how many there are and where."""
    if len(anchor) != 1 or next(iter(anchor)) not in ANCHOR_KINDS:
        raise Refused(f"anchor {anchor!r}: give exactly one of {', '.join(ANCHOR_KINDS)}")
    (kind, value), label = next(iter(anchor.items())), describe(anchor)
    found = list(MATCHERS[kind](scope, value))
    if kind == "return" and value in ("first", "last") and found:
        found = found[:1] if value == "first" else found[-1:]
    if not found:
        raise Refused(
            f"anchor {label} is lost: no such node in the symbol's own scope; look for where upstream moved it"
        )
    if len(found) > 1:
        where = lines_of([hit.expression or hit.statement for hit in found])
        raise Refused(
            f"anchor {label} is not unique: {len(found)} matches ({where}); choose a narrower symbol or another anchor"
        )
    return found[0]


def describe(anchor: dict[str, str]) -> str:
    return ", ".join(f"{kind} = {value!r}" for kind, value in anchor.items())


def parsed(text: str) -> object:
    try:
        return canonical(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        raise Refused(f"anchor text {text!r} is not a Python expression") from None


def match_assign(scope: ast.AST, name: str) -> Iterator[Found]:
    for node, _, _ in own_nodes(scope):
        if name in targets_of(node):
            yield Found(node, node.value, node)


def match_call(scope: ast.AST, name: str) -> Iterator[Found]:
    wanted = parsed(name)
    for node, parent, statement in own_nodes(scope):
        if isinstance(node, ast.Call) and canonical(node.func) == wanted:
            yield Found(statement, node, parent)


def match_return(scope: ast.AST, which: str) -> Iterator[Found]:
    if which not in ("first", "last", "only"):
        raise Refused(f"anchor return = {which!r}: give first, last or only")
    for node, _, _ in own_nodes(scope):
        if isinstance(node, ast.Return):
            yield Found(node, node.value, node)


def match_if(scope: ast.AST, condition: str) -> Iterator[Found]:
    wanted = parsed(condition)
    for node, _, _ in own_nodes(scope):
        if isinstance(node, ast.If) and canonical(node.test) == wanted:
            yield Found(node, node.test, node)


def match_import(scope: ast.AST, module: str) -> Iterator[Found]:
    for node, _, _ in own_nodes(scope):
        if isinstance(node, ast.Import) and module in [alias.name for alias in node.names]:
            yield Found(node, None)
        if isinstance(node, ast.ImportFrom) and "." * node.level + (node.module or "") == module:
            yield Found(node, None)


def match_expr(scope: ast.AST, text: str) -> Iterator[Found]:
    wanted = parsed(text)
    for node, parent, statement in own_nodes(scope):
        if isinstance(node, ast.expr) and canonical(node) == wanted:
            yield Found(statement, node, parent)


MATCHERS = {
    "assign": match_assign,
    "call": match_call,
    "return": match_return,
    "if": match_if,
    "import": match_import,
    "expr": match_expr,
}
