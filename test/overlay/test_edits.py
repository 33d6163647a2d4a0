# SPDX-License-Identifier: Apache-2.0
"""What each action does to a module, and which edits are refused before anything is written."""

import pytest

from overlay.edits import Edit, apply, load_edits
from overlay.errors import Refused

MODULE = '''# a comment with umlauts: ä ö ü
NAMES = [
    "triton",
    "ascend",  # one, two
]
BARE = [
    "triton",
    "ascend"
]
SHORT = ["a", "b"]


@decorate
def pick(name, default=None):
    """Pick one."""
    ok = name in NAMES or default
    text = "ä"; other = ok
    if name and ok:
        return name
    elif default:
        pass
    lookup(
        name,
        default,
    )
    return -ok.value() * 2


class Runner:
    def start(self):
        return lookup("a", None) and self.ready
'''


def edited(action, text, symbol="pick", anchor=None, source=MODULE):
    edit = Edit("sglang/m.py", symbol, action, text, "w", "u", "r", "t", anchor)
    return apply("sglang/m.py", source, [edit], signed=False)


def changed_lines(result, source=MODULE):
    before = source.split("\n")
    return [line for line in result.split("\n") if line not in before]


def test_before_and_after_take_the_indentation_of_the_statement():
    result = edited("before", "first()\nsecond()", anchor={"call": "lookup"})
    assert "    first()\n    second()\n    lookup(\n        name," in result
    result = edited("after", "first()", anchor={"call": "lookup"})
    assert "        default,\n    )\n    first()\n    return" in result


def test_around_a_definition_decorators_belong_to_it():
    assert "import x\n@decorate\ndef pick" in edited("before", "import x")
    assert "* 2\n\n\nimport x\n\n\nclass Runner" in edited("after", "import x")


def test_first_goes_after_the_docstring():
    assert '    """Pick one."""\n    guard()\n    ok = name' in edited("first", "guard()")
    assert "    def start(self):\n        guard()\n        return" in edited("first", "guard()", symbol="Runner.start")


@pytest.mark.parametrize(
    "symbol, text, expected",
    [
        ("NAMES", '"ours",', '    "ascend",  # one, two\n    "ours",\n]'),
        ("NAMES", '"ours",\n"more",  # why', '    "ascend",  # one, two\n    "ours",\n    "more",  # why\n]'),
        ("BARE", '"ours"', '    "ascend",\n    "ours",\n]'),
        ("SHORT", '"ours", "more"', "SHORT = [\"a\", \"b\", 'ours', 'more']"),
    ],
)
def test_append_to_a_list(symbol, text, expected):
    assert expected in edited("append", text, symbol=symbol)


@pytest.mark.parametrize(
    "anchor, text, line",
    [
        ({"assign": "ok"}, "$old or more", "    ok = name in NAMES or default or more"),
        ({"assign": "ok"}, "$old and more", "    ok = (name in NAMES or default) and more"),
        ({"assign": "text"}, '"ö"', '    text = "ö"; other = ok'),
        ({"if": "name and ok"}, "name", "    if name:"),
        ({"if": "default"}, "$old > 1", "    elif default > 1:"),
        ({"return": "last"}, "0", "    return 0"),
        ({"call": "ok.value"}, "a or b", "    return -(a or b) * 2"),
        ({"call": "ok.value"}, "$old + 1", "    return -(ok.value() + 1) * 2"),
        ({"call": "ok.value"}, "f($old)", "    return -f(ok.value()) * 2"),
        ({"expr": "ok.value() "}, "ok", "    return -ok * 2"),
    ],
)
def test_replace_an_expression_never_regroups_its_neighbours(anchor, text, line):
    assert changed_lines(edited("replace", text, anchor=anchor)) == [line]


def test_replace_the_value_that_a_symbol_is_bound_to():
    assert changed_lines(edited("replace", "[*$old, 'c']", symbol="SHORT")) == ['SHORT = [*["a", "b"], \'c\']']


def test_replace_a_statement_keeps_the_shape_of_the_old_one():
    result = edited("replace", "if guard:\n    $old", anchor={"call": "lookup"})
    assert "    if guard:\n        lookup(\n            name,\n            default,\n        )\n    return" in result
    assert "    del ok\n    return" in edited("replace", "del ok", anchor={"call": "lookup"})


def test_several_edits_at_one_place_keep_their_order():
    edits = [
        Edit("m", "pick", "before", f"{name}()", "w", "u", "r", "t", {"call": "lookup"}, number=number)
        for number, name in enumerate("abc")
    ]
    assert "    a()\n    b()\n    c()\n    lookup(" in apply("m", MODULE, edits, signed=False)


@pytest.mark.parametrize(
    "action, text, symbol, anchor, message",
    [
        ("before", "for x in y: pass", "pick", {"call": "lookup"}, r"holds logic \(For\)"),
        ("before", "def f(): pass", "pick", {"call": "lookup"}, r"holds logic \(FunctionDef\)"),
        ("before", "if a:\n    b()\nelse:\n    c()", "pick", {"call": "lookup"}, r"holds logic \(If\)"),
        ("before", "a b", "pick", {"call": "lookup"}, "does not parse alone"),
        ("append", "x = 1", "NAMES", None, "does not parse alone"),
        ("append", '"x"', "pick", None, "needs a symbol bound to a list"),
        ("first", "x()", "Runner", None, "needs a function"),
        ("before", "x()", "", None, "an edit of the module as a whole needs an anchor"),
        ("before", "x()", "pick", {"if": "default"}, "shares a line with another one"),
        ("before", "x()", "pick", {"assign": "other"}, "shares a line with another one"),
        ("replace", "x", "pick", None, "names no expression"),
        ("replace", "if a:\n    b($old)", "pick", {"call": "lookup"}, "needs a line of its own"),
        ("before", "return", "", {"assign": "NAMES"}, "does not compile: 'return' outside function"),
    ],
)
def test_an_edit_that_cannot_be_made_is_refused(action, text, symbol, anchor, message):
    with pytest.raises(Refused, match=message):
        edited(action, text, symbol, anchor)


def test_edits_that_overlap_are_refused():
    edits = [
        Edit("m", "pick", "replace", "if a:\n    $old", "w", "u", "r", "t", {"call": "lookup"}, number=1),
        Edit("m", "pick", "replace", "other()", "w", "u", "r", "t", {"call": "lookup"}, number=2),
    ]
    with pytest.raises(Refused, match=r"m:pick.*overlaps m:pick.*merge them"):
        apply("m", MODULE, edits, signed=False)


def test_every_malformed_edit_is_reported_at_once(tmp_path):
    (tmp_path / "a.py.toml").write_text('[[edit]]\nsymbol = "x"\naction = "before"\n')
    (tmp_path / "b.py.toml").write_text("[[edit]\n")
    good = 'symbol = "x"\nwhy = "w"\nupstream = "u"\nretire_when = "r"\ntest = "t"\n'
    texts = {
        "c": 'action = "before"\ntext = "a\\nb\\nc\\nd"\n',
        "d": 'action = "insert"\ntext = "a"\n',
        "e": 'action = "after"\ntext = "$old"\n',
        "f": 'action = "append"\ntext = "a"\nanchor = { call = "x" }\n',
        "g": 'action = "append"\ntext = "a"\nwhen = "now"\n',
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py.toml").write_text("[[edit]]\n" + good + text)
    (tmp_path / "h.py.toml").write_text("[[edit]]\n" + good.replace('"w"', '""') + 'action = "append"\ntext = "a"\n')
    with pytest.raises(Refused) as refusal:
        load_edits(tmp_path)
    report = "\n".join(refusal.value.reasons)
    for expected in (
        "sglang/a.py, edit 1: key 'why' is missing",
        "b.py.toml: not valid TOML",
        "sglang/c.py, edit 1: text has 4 lines",
        "sglang/d.py, edit 1: action 'insert'",
        "sglang/e.py, edit 1: $old has a meaning in action 'replace' only",
        "sglang/f.py, edit 1: action 'append' takes no anchor",
        "sglang/g.py, edit 1: key 'when' is unknown",
        "sglang/h.py, edit 1: key 'why' is empty",
    ):
        assert expected in report
