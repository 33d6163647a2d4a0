# SPDX-License-Identifier: Apache-2.0
"""Anchors name structure: they survive formatting, stay inside their symbol's scope, and are lost or doubled loudly."""

import ast
import textwrap

import pytest

from overlay.anchors import find_anchor, find_symbol, tree_hash
from overlay.errors import Refused

SOURCE = textwrap.dedent(
    '''
    import os
    from a.b import c

    LIMIT: int = 3
    first, (second, third) = 1, (2, 3)

    if os.name:
        def chosen():
            return 1

    def work(x, y):
        """Text."""
        total = 0
        total += x
        self.deep.value = call(x)
        def inner():
            total = 9
            return call(x)
        if x > 1 and y:
            return call(y)
        elif y:
            return None
        return other.call(x + 1)

    class Runner:
        async def start(self):
            pass
    '''
)


@pytest.fixture
def tree():
    return ast.parse(SOURCE)


@pytest.mark.parametrize("name", ["work", "work.inner", "Runner.start", "Runner", "chosen", "LIMIT", "third"])
def test_symbols_are_found_through_if_and_tuples_and_inside_functions(tree, name):
    assert find_symbol(tree, name) is not tree


@pytest.mark.parametrize(
    "anchor, line",
    [
        ({"assign": "self.deep.value"}, "self.deep.value = call(x)"),
        ({"call": "other.call"}, "return other.call(x + 1)"),
        ({"return": "last"}, "return other.call(x + 1)"),
        ({"return": "first"}, "return call(y)"),
        ({"if": "(x > 1) and (y)"}, "if x > 1 and y:"),
        ({"expr": "x+1"}, "return other.call(x + 1)"),
        ({"expr": "call( y )"}, "return call(y)"),
    ],
)
def test_each_kind_finds_its_statement(tree, anchor, line):
    statement = find_anchor(find_symbol(tree, "work"), anchor).statement
    assert SOURCE.splitlines()[statement.lineno - 1].strip() == line


@pytest.mark.parametrize(
    "anchor, line",
    [({"import": "a.b"}, "from a.b import c"), ({"import": "os"}, "import os"), ({"assign": "second"}, "first, (")],
)
def test_the_module_is_a_scope_too(tree, anchor, line):
    assert SOURCE.splitlines()[find_anchor(tree, anchor).statement.lineno - 1].startswith(line)


def test_nested_definitions_are_scopes_of_their_own(tree):
    """work's own scope has `call(x)` once; the one in inner() belongs to work.inner."""
    assert find_anchor(find_symbol(tree, "work"), {"expr": "call(x)"}).statement.lineno == 16
    assert find_anchor(find_symbol(tree, "work.inner"), {"expr": "call(x)"}).statement.lineno == 19
    with pytest.raises(Refused, match="lost"):
        find_anchor(tree, {"call": "call"})


@pytest.mark.parametrize(
    "anchor, message",
    [
        ({"assign": "total"}, r"not unique: 2 matches \(lines 14, 15\)"),
        ({"call": "call"}, "not unique: 2 matches"),
        ({"return": "only"}, "not unique: 3 matches"),
        ({"assign": "missing"}, "is lost"),
        ({"return": "second"}, "give first, last or only"),
        ({"expr": "x +"}, "not a Python expression"),
        ({"line": "3"}, "give exactly one of"),
        ({"call": "call", "assign": "total"}, "give exactly one of"),
    ],
)
def test_a_lost_doubled_or_malformed_anchor_is_refused(tree, anchor, message):
    with pytest.raises(Refused, match=message):
        find_anchor(find_symbol(tree, "work"), anchor)


def test_a_lost_symbol_is_refused_with_near_names(tree):
    with pytest.raises(Refused, match="no 'wrok' there; did upstream rename it to work"):
        find_symbol(tree, "wrok")
    with pytest.raises(Refused, match="no 'stop' there"):
        find_symbol(tree, "Runner.stop")


def test_a_symbol_bound_twice_is_refused():
    with pytest.raises(Refused, match=r"bound 2 times \(lines 1, 2\)"):
        find_symbol(ast.parse("x = 1\nx = 2\n"), "x")


def test_the_hash_ignores_form_and_sees_meaning():
    def sha(text):
        return tree_hash(ast.parse(text).body[0])

    one = sha("def f(a, b):\n    'doc'\n    return a + b  # why\n")
    assert one == sha("def f(\n    a, b,\n):\n    '''Other doc.'''\n\n    return (a + b)\n")
    different = ["a - b", "b + a", "a + b + 0", "'a + b'", "a + True"]
    others = {sha(f"def f(a, b):\n    return {text}\n") for text in different}
    assert one not in others and len(others) == len(different)
    assert sha("x = 1") != sha("x = True") != sha("x = '1'")


def test_the_hash_does_not_depend_on_the_python_version():
    """The value was computed with 3.11, 3.12 and 3.13; their syntax trees differ in parts that say nothing."""
    text = "async def f(a: int = 1, *b, **c) -> str:\n    x = f'{a!r:>{b}} {c}'\n    return x\n"
    assert tree_hash(ast.parse(text).body[0]) == "3e5e38e2ca01"
