"""Every script of Redis is a file of its own, whole, parses, and uses no name that it does not declare."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from luaparser.ast import SyntaxException

from kvmesh.config import ROOT
from tests.lua_names import FOLDERS, SCRIPTS, constants, functions, names


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SCRIPTS, ids=_id)
def test_a_script_uses_declared_names_alone(path: Path) -> None:
    """An undeclared name would raise in Redis, on the path that reaches it."""
    assert names(path.read_text(encoding="utf-8")).undeclared == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("return total", [(1, "total")]),
        ("total = 1", [(1, "total")]),
        ("local a = 1\nreturn a + b", [(2, "b")]),
        ("local a = a", [(1, "a")]),
        ("do local a = 1 end\nreturn a", [(2, "a")]),
        ("if ARGV[1] then local a = 1 end return a", [(1, "a")]),
        ("for i = 1, 3 do end return i", [(1, "i")]),
        ("for _, x in ipairs(rows) do end", [(1, "rows")]),
        ("local f = function(x) return x end return x", [(1, "x")]),
        ("local function f(x) return y end return f", [(1, "y")]),
        ("function f() end", [(1, "f")]),
        ("return {a = b, [c] = 1}", [(1, "b"), (1, "c")]),
        ("return os.time()", [(1, "os")]),
        ("local t = {} return t[key]", [(1, "key")]),
        ("return print('x')", [(1, "print")]),
        ("while x do end", [(1, "x")]),
    ],
)
def test_an_undeclared_name_is_found(text: str, found: list[tuple[int, str]]) -> None:
    """Wherever it stands: read, written, or out of its block."""
    assert sorted(names(text).undeclared) == found


@pytest.mark.parametrize(
    "text",
    [
        "local a, b = 1\nreturn a + #b",
        "local function f(n) return n and f(n - 1) end return f(3)",
        "for i = 1, #ARGV do redis.call('DEL', KEYS[i]) end",
        "for name, by in pairs({x = 1}) do local y = name .. by end",
        "local t = {x = 1} return t.x, t['x'], ('%d'):format(3)",
        "repeat local done = true until done",
        "if KEYS[1] then return 1 elseif ARGV[1] then return 2 else return cjson.encode({}) end",
    ],
)
def test_declared_names_pass(text: str) -> None:
    """Locals, parameters, fields, methods and the globals of Redis."""
    assert names(text).undeclared == []


@pytest.mark.parametrize("text", ["local x =", "return 1 +", "if x then", "local x = = 2"])
def test_what_is_no_lua_is_refused(text: str) -> None:
    """The parser raises."""
    with pytest.raises(SyntaxException):
        names(text)


def test_functions_and_constants_of_two_scripts_of_a_folder_are_the_same() -> None:
    """Scripts are whole: a function that two of them need stands in both, word by word."""
    bodies: dict[tuple[Path, str], set[str]] = defaultdict(set)
    values: dict[tuple[Path, str], set[object]] = defaultdict(set)
    uses: dict[str, int] = defaultdict(int)
    for path in SCRIPTS:
        text = path.read_text(encoding="utf-8")
        for name, body in functions(text):
            bodies[path.parent, name].add(body)
            uses[name] += 1
        for name, value in constants(text).items():
            values[path.parent, name].add(value)
            uses[name] += 1
    assert [name for (_, name), found in bodies.items() if len(found) > 1] == []
    assert [name for (_, name), found in values.items() if len(found) > 1] == []
    shared = {"read_executions", "insert_execution", "ensure_predecessor", "OUTPUT_ADDED", "LEDGER_FORMAT"}
    assert {name for name in shared if uses[name] == 2} == shared


def test_no_script_stands_in_a_string() -> None:
    """A script in Python would be parsed by nothing before it runs."""
    modules = [path for folder in (*FOLDERS, "bench") for path in (ROOT / folder).rglob("*.py")]
    assert len(SCRIPTS) >= 9
    assert [_id(path) for path in modules if "redis.call(" in path.read_text(encoding="utf-8")] == []


def test_every_script_is_used_by_a_module_of_its_folder() -> None:
    """`Script.beside(__file__, "name.lua")` in a module beside it."""
    for path in SCRIPTS:
        sources = [each.read_text(encoding="utf-8") for each in path.parent.glob("*.py")]
        assert any(f'Script.beside(__file__, "{path.name}")' in source for source in sources), _id(path)


def test_wheel_and_images_carry_the_scripts() -> None:
    """Both take Python files and what they are told besides."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "*.lua" in project["tool"]["setuptools"]["package-data"]["*"]
    build = (ROOT / "deploy" / "images" / "build.sh").read_text(encoding="utf-8")
    assert re.search(r"find kvmesh services .*-name '\*\.lua'", build)
