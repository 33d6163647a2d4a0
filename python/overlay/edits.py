# SPDX-License-Identifier: Apache-2.0
"""What an edit is, and how the edits of one module are applied: all of them resolve, or none is made.

An edit constructs, wires or delegates in at most three lines; logic goes into files of ours. The actions:

    before | after   statements around the statement that holds the anchor (no anchor: the symbol with its decorators)
    first            statements at the head of a function, after its docstring
    append           new last elements of the list that the symbol is bound to
    replace          an expression takes the place of the anchor's expression (assign and return: the value; if: the
                     condition; no anchor: the value that the symbol is bound to), a statement that of its statement

`$old` in a replacement stands for the replaced source: an edit that adds a condition does not repeat upstream's words.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

from .anchors import DEFINITIONS, Found, canonical, describe, docstring_of, find_anchor, find_symbol, tree_hash
from .errors import Refused

ACTIONS = ("before", "after", "first", "append", "replace")
MAX_LINES = 3
OLD, PLACEHOLDER = "$old", "__replaced_source__"
REQUIRED = {"symbol", "action", "text", "why", "upstream", "retire_when", "test"}
OPTIONAL = {"anchor", "symbol_sha"}
# Logic in an edit is refused; a plain `if` without `else` is the guard that upstream itself writes at such places.
LOGIC = (ast.For, ast.AsyncFor, ast.While, ast.Try, ast.With, ast.AsyncWith, ast.Match, *DEFINITIONS)
ATOMS = (ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Call, ast.List, ast.Dict, ast.Set, ast.ListComp)


@dataclass(frozen=True)
class Edit:
    module: str  # path in the wheel: sglang/srt/...
    symbol: str
    action: str
    text: str
    why: str
    upstream: str
    retire_when: str
    test: str
    anchor: dict[str, str] | None = None
    symbol_sha: str = ""
    number: int = 1  # position in its file
    twin: int = 1  # position among the edits of the same symbol

    @property
    def name(self) -> str:
        """How messages, the series and the tests call this edit."""
        return f"{self.module}:{self.symbol or 'module'}" + (f"#{self.twin}" if self.twin > 1 else "")

    @property
    def place(self) -> str:
        return f"{self.name} ({self.action}{' ' + describe(self.anchor) if self.anchor else ''})"


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of the upstream text give way to `text`."""

    start: int
    end: int
    text: str
    edit: Edit


def load_edits(root: Path) -> list[Edit]:
    """Every edit of edits/**/<module>.toml; all malformed ones are reported together."""
    edits, reasons = [], []
    for path in sorted(root.rglob("*.toml")):
        module = "sglang/" + path.relative_to(root).as_posix().removesuffix(".toml")
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            reasons.append(f"{path.relative_to(root.parent)}: not valid TOML: {error}")
            continue
        for number, fields in enumerate(table.get("edit", []), start=1):
            wrong = complaints(fields)
            if wrong:
                reasons += [f"{module}, edit {number}: {complaint}" for complaint in wrong]
            else:
                text = textwrap.dedent(fields["text"].strip("\n")).rstrip()
                twin = 1 + sum(edit.module == module and edit.symbol == fields["symbol"] for edit in edits)
                edits.append(Edit(module=module, number=number, twin=twin, **{**fields, "text": text}))
    if reasons:
        raise Refused(*reasons)
    return edits


def complaints(fields: dict) -> list[str]:
    """What is wrong with the form of one edit, before any upstream file is looked at."""
    wrong = [f"key {key!r} is missing" for key in sorted(REQUIRED - fields.keys())]
    wrong += [f"key {key!r} is unknown" for key in sorted(fields.keys() - REQUIRED - OPTIONAL)]
    if wrong:
        return wrong
    action, anchor, text = fields["action"], fields.get("anchor"), fields["text"].strip("\n")
    if action not in ACTIONS:
        wrong.append(f"action {action!r}: give one of {', '.join(ACTIONS)}")
    if action in ("first", "append") and anchor:
        wrong.append(f"action {action!r} takes no anchor")
    for key in ("why", "upstream", "retire_when", "test"):
        if not str(fields[key]).strip():
            wrong.append(f"key {key!r} is empty")
    lines = num_lines(text)
    if not 1 <= lines <= MAX_LINES:
        wrong.append(f"text has {lines} lines; 1 to {MAX_LINES} are allowed: move the rest into a file of ours")
    if OLD in text and action != "replace":
        wrong.append(f"{OLD} has a meaning in action 'replace' only")
    return wrong


def num_lines(text: str) -> int:
    """Lines of code: upstream's formatter wants a blank one after an import."""
    return sum(bool(line.strip()) for line in text.splitlines())


def parse_text(edit: Edit) -> ast.AST:
    """The text as a syntax tree: an expression where it is one and may be one, else statements."""
    text = textwrap.dedent(edit.text).replace(OLD, PLACEHOLDER)
    try:
        if edit.action == "append":
            tree = ast.parse(f"[\n{text}\n]", mode="eval").body
        elif edit.action == "replace" and is_expression(text):
            tree = ast.parse(f"(\n{text}\n)", mode="eval").body
        else:
            tree = ast.parse(text)
    except SyntaxError as error:
        raise Refused(f"text does not parse alone: {error.msg} (line {error.lineno} of the text)") from None
    for node in ast.walk(tree):
        if isinstance(node, LOGIC) or (isinstance(node, ast.If) and node.orelse):
            raise Refused(f"text holds logic ({type(node).__name__}): an edit only constructs, wires or delegates")
    return tree


def is_expression(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return True


class Module:
    """The text of one upstream module, addressed by syntax nodes."""

    def __init__(self, path: str, text: str):
        if "\r" in text or "\f" in text:
            raise Refused(f"{path}: unusual line breaks; such a file cannot be edited by symbol")
        self.path, self.text, self.tree = path, text, ast.parse(text)
        self.lines = text.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)

    def offset(self, line: int, utf8_column: int) -> int:
        """Syntax trees count columns in UTF-8 bytes, we count characters."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:utf8_column].decode())

    def start(self, node: ast.AST) -> int:
        first = min([node, *getattr(node, "decorator_list", [])], key=lambda n: n.lineno)
        at_sign = first is not node
        return self.offset(first.lineno, first.col_offset) - at_sign

    def end(self, node: ast.AST) -> int:
        return self.offset(node.end_lineno, node.end_col_offset)

    def source(self, node: ast.AST) -> str:
        return self.text[self.start(node) : self.end(node)]

    def whole_lines(self, statement: ast.stmt) -> tuple[int, int, str]:
        """(start of its first line, start of the line after it, indentation) of a statement that shares no line."""
        start, end = self.start(statement), self.end(statement)
        first = self.text.rfind("\n", 0, start) + 1
        last = self.text.find("\n", end)
        last = len(self.text) if last < 0 else last
        indent, tail = self.text[first:start], self.text[end:last].strip()
        if indent.strip() or (tail and not tail.startswith("#")) or self.text.startswith("elif", start):
            raise Refused(f"the statement at line {statement.lineno} shares a line with another one: use replace")
        return first, min(last + 1, len(self.text)), indent


def scope_and_hash(module: Module, edit: Edit) -> tuple[ast.AST, str]:
    """The symbol's node and the hash that `symbol_sha` holds.

    A module's own hash would change with every release: an edit of the module as a whole is signed with the statement
    that its anchor names.
    """
    scope = find_symbol(module.tree, edit.symbol)
    if isinstance(scope, ast.Module):
        if not edit.anchor:
            raise Refused("an edit of the module as a whole needs an anchor")
        return scope, tree_hash(find_anchor(scope, edit.anchor).statement)
    return scope, tree_hash(scope)


def resolve(module: Module, edit: Edit, *, signed: bool = True) -> Span:
    scope, sha = scope_and_hash(module, edit)
    tree = parse_text(edit)
    if signed and edit.symbol_sha != sha:
        found = f"is {sha}, signed is {edit.symbol_sha}" if edit.symbol_sha else f"is {sha}, the edit is not signed"
        raise Refused(f"symbol hash {found}: review the symbol, then run `python -m overlay sign`")
    if edit.action == "append":
        return append(module, edit, scope, tree)
    if edit.action == "first":
        return first(module, edit, scope)
    if edit.anchor:
        found = find_anchor(scope, edit.anchor)
    elif isinstance(scope, (ast.Assign, ast.AnnAssign)):
        found = Found(scope, scope.value, scope)
    else:
        found = Found(scope, None)
    if edit.action == "replace":
        if isinstance(tree, ast.expr):
            return replace_expression(module, edit, found, tree)
        return replace_statement(module, edit, found)
    begin, end, indent = module.whole_lines(found.statement)
    added = textwrap.indent(edit.text, indent) + "\n"
    if edit.action == "before":
        return Span(begin, begin, added, edit)
    # Upstream's formatter wants blank lines after a definition; those before its next statement are there already.
    blank = ("\n" if indent else "\n\n") if isinstance(found.statement, DEFINITIONS) else ""
    return Span(end, end, blank + added, edit)


def first(module: Module, edit: Edit, scope: ast.AST) -> Span:
    if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise Refused(f"action 'first' needs a function, {edit.symbol!r} is none")
    docstring = docstring_of(scope)
    begin, end, indent = module.whole_lines(docstring or scope.body[0])
    where = end if docstring else begin
    return Span(where, where, textwrap.indent(edit.text, indent) + "\n", edit)


def append(module: Module, edit: Edit, scope: ast.AST, elements: ast.List) -> Span:
    shown = getattr(scope, "value", None)
    if not isinstance(shown, (ast.List, ast.Tuple, ast.Set)) or not shown.elts:
        raise Refused(f"action 'append' needs a symbol bound to a list with elements, {edit.symbol!r} is none")
    last = shown.elts[-1]
    end, close = module.end(last), module.end(shown) - 1
    gap = "\n".join(line.split("#")[0] for line in module.text[end:close].split("\n"))
    text = edit.text if edit.text.split("#")[0].rstrip().endswith(",") or "#" in edit.text else edit.text + ","
    if shown.lineno == shown.end_lineno:
        joined = ", ".join(ast.unparse(element) for element in elements.elts)
        return Span(end, close, f", {joined}", edit)
    if "\n" not in gap:
        raise Refused(f"the list's last element and its bracket share line {last.end_lineno}: use replace")
    line = module.text.find("\n", end) + 1
    indent = " " * (module.start(last) - module.text.rfind("\n", 0, module.start(last)) - 1)
    added = textwrap.indent(text, indent) + "\n"
    if "," in gap:
        return Span(line, line, added, edit)
    return Span(end, line, "," + module.text[end:line] + added, edit)


def replace_expression(module: Module, edit: Edit, found: Found, tree: ast.expr) -> Span:
    old = found.expression
    if old is None:
        raise Refused("the anchor names no expression to replace: replace the statement, or choose another anchor")
    source = module.source(old)
    text = edit.text.replace(OLD, source)
    # Operators around or inside the replacement must not regroup it.
    if canonical_flat(reparse(text)) != canonical_flat(substitute(tree, old)):
        text = edit.text.replace(OLD, f"({source})")
    if (
        isinstance(found.parent, ast.expr)
        and not isinstance(found.parent, (ast.Call, ast.List))
        and not isinstance(tree, ATOMS)
    ):
        text = f"({text})"
    begin = module.start(old)
    line = module.text.rfind("\n", 0, begin) + 1
    indent = re.match(r"\s*", module.text[line:]).group()
    first_line, *rest = text.split("\n") if OLD not in edit.text else [text]
    text = "\n".join([first_line, *(indent + more if more else more for more in rest)])
    return Span(begin, module.end(old), text, edit)


def replace_statement(module: Module, edit: Edit, found: Found) -> Span:
    begin, end, indent = module.whole_lines(found.statement)
    source = module.source(found.statement)
    lines = []
    for line in edit.text.split("\n"):
        if line.strip() == OLD:
            if any(isinstance(n, ast.Constant) and n.end_lineno > n.lineno for n in ast.walk(found.statement)):
                raise Refused(f"{OLD}: the statement holds a text of several lines and cannot be indented")
            deeper = line[: len(line) - len(line.lstrip())]
            head, *rest = source.split("\n")
            lines += [indent + deeper + head, *(deeper + more if more else more for more in rest)]
        elif OLD in line:
            raise Refused(f"{OLD} stands for a statement here and needs a line of its own")
        else:
            lines.append(indent + line if line else line)
    return Span(begin, end, "\n".join(lines) + "\n", edit)


def reparse(text: str) -> ast.AST:
    try:
        return ast.parse(f"(\n{text}\n)", mode="eval").body
    except SyntaxError:
        return ast.Constant(None)


def substitute(tree: ast.expr, old: ast.expr) -> ast.expr:
    class Put(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return old if node.id == PLACEHOLDER else node

    return Put().visit(ast.parse(ast.unparse(tree), mode="eval").body)


def canonical_flat(node: ast.AST) -> object:
    """`(a or b) or c` and `a or b or c` mean the same."""

    class Flat(ast.NodeTransformer):
        def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
            self.generic_visit(node)
            values = []
            for value in node.values:
                same = isinstance(value, ast.BoolOp) and type(value.op) is type(node.op)
                values += value.values if same else [value]
            return ast.BoolOp(node.op, values)

    return canonical(Flat().visit(node))


def apply(path: str, text: str, edits: list[Edit], *, signed: bool = True) -> str:
    """The module with all its edits, or one refusal with every reason."""
    module, spans, reasons = Module(path, text), [], []
    for edit in edits:
        try:
            spans.append(resolve(module, edit, signed=signed))
        except Refused as refusal:
            reasons += [f"{edit.place}: {reason}" for reason in refusal.reasons]
    spans.sort(key=lambda span: (span.start, span.end))
    for one, two in itertools.pairwise(spans):
        if two.start < one.end:
            reasons.append(f"{two.edit.place}: overlaps {one.edit.place}: merge them into one edit")
    if reasons:
        raise Refused(*reasons)
    for span in reversed(spans):
        text = text[: span.start] + span.text + text[span.end :]
    try:
        compile(text, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise Refused(f"{path}: the edited module does not compile: {error.msg}, line {error.lineno}") from None
    return text
