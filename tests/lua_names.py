"""Names that a Lua script uses and does not declare, as luaparser sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from luaparser import ast, astnodes

from kvmesh.config import ROOT

FOLDERS: Final = ("kvmesh", "services", "engines", "simulator", "controlplane")
SCRIPTS: Final = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.lua"))

GLOBALS: Final = frozenset(
    {"KEYS", "ARGV", "redis", "cjson", "cmsgpack", "struct", "bit", "math", "string", "table"}
    | {"assert", "error", "ipairs", "next", "pairs", "pcall", "rawequal", "rawget", "rawset", "select"}
    | {"tonumber", "tostring", "type", "unpack", "xpcall", "getmetatable", "setmetatable"}
)
"""Names that Redis 6.2 gives to every script."""


@dataclass
class Names:
    """Names of a script: `undeclared` are (line, name), `members` are (global, member) as in `math.floor`."""

    undeclared: list[tuple[int, str]] = field(default_factory=list)
    members: set[tuple[str, str]] = field(default_factory=set)
    _line: int = 1

    def read(self, node: Any, scope: set[str]) -> None:
        """Read `node`, in which the names of `scope` are declared; add what it declares to `scope`."""
        if isinstance(node, astnodes.Node):
            self._line = node.line or self._line  # luaparser gives targets no line
        if isinstance(node, list):
            for each in node:
                self.read(each, scope)
        elif isinstance(node, astnodes.Name):
            if node.id not in scope and node.id not in GLOBALS:
                self.undeclared.append((node.line or self._line, node.id))
        elif isinstance(node, astnodes.LocalAssign):
            self.read(node.values, scope)
            scope.update(_ids(node.targets))
        elif isinstance(node, astnodes.LocalFunction):
            scope.add(node.name.id)
            self.read(node.body, scope | _ids(node.args))
        elif isinstance(node, astnodes.AnonymousFunction):
            self.read(node.body, scope | _ids(node.args))
        elif isinstance(node, astnodes.Function | astnodes.Method):
            self.read(node.name, scope)
            self.read(node.body, scope | _ids(node.args) | {"self"})
        elif isinstance(node, astnodes.Fornum):
            self.read([node.start, node.stop, node.step], scope)
            self.read(node.body, scope | _ids([node.target]))
        elif isinstance(node, astnodes.Forin):
            self.read(node.iter, scope)
            self.read(node.body, scope | _ids(node.targets))
        elif isinstance(node, astnodes.Repeat):
            inner = set(scope)
            self.read(node.body.body, inner)
            self.read(node.test, inner)
        elif isinstance(node, astnodes.Block):
            self.read(node.body, set(scope))
        else:
            self._read_parts(node, scope)

    def _read_parts(self, node: Any, scope: set[str]) -> None:
        """Read an expression or a statement that declares nothing."""
        if isinstance(node, astnodes.Index):
            self.read(node.value, scope)
            if node.notation is not astnodes.IndexNotation.DOT:
                self.read(node.idx, scope)
            elif isinstance(node.value, astnodes.Name) and node.value.id in GLOBALS - scope:
                self.members.add((node.value.id, node.idx.id))
        elif isinstance(node, astnodes.Invoke):
            self.read([node.source, node.args], scope)
        elif isinstance(node, astnodes.Field):
            self.read([node.value, node.key if node.between_brackets else []], scope)
        elif isinstance(node, astnodes.Node):
            parts = (
                part for name, part in vars(node).items() if name != "comments" and not name.startswith("_")
            )
            self.read([part for part in parts if isinstance(part, list | astnodes.Node)], scope)


def names(text: str) -> Names:
    """Return the names of the script `text`. Raises luaparser's SyntaxException if it is not Lua."""
    found = Names()
    found.read(ast.parse(text), set())
    return found


def constants(text: str) -> dict[str, object]:
    """Return the constants of the script `text`: locals of its outermost block, in capitals, with a literal value."""
    found: dict[str, object] = {}
    for each in ast.parse(text).body.body:
        if isinstance(each, astnodes.LocalAssign):
            for target, value in zip(each.targets, each.values, strict=False):
                if target.id.isupper() and isinstance(value, astnodes.Number | astnodes.String):
                    found[target.id] = value.n if isinstance(value, astnodes.Number) else value.s
    return found


def functions(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each function of the outermost block, with the comment above it."""
    rows = text.split("\n")
    for at, row in enumerate(rows):
        if row.startswith("local function "):
            first = at
            while first and rows[first - 1].startswith("--"):
                first -= 1
            yield row.split()[2].partition("(")[0], "\n".join(rows[first : rows.index("end", at) + 1])


def _ids(nodes: Sequence[Any] | Iterable[Any]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, astnodes.Name)}
