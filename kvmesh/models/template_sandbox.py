"""Jinja's sandbox with a budget: each loop, operation and filter of a template is paid for, before it takes memory.

The budget is that of the rendering which runs in this thread. Loops, `~`, slices and comparisons have no hook in Jinja, so
the parsed template is changed: each becomes a filter that pays.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.runtime
import jinja2.utils
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kvmesh.models.template_budget import Budget, Effort, TemplateError

RANGE_MAX: Final = 100_000
"""Longest range of a loop, as in Jinja's own sandbox."""

WIDTH_MAX: Final = 10_000
"""Largest padding, indentation or precision."""

NUMBER_BITS_MAX: Final = 1024
"""Largest number that arithmetic of a template makes."""

SLOW_CHARACTERS_MAX: Final = 10_000
"""Longest text of a filter whose time may grow with the square of the length."""

COMPILE_STEPS_MAX: Final = 100_000

_PERCENT_FIELD: Final = re.compile(r"%[^a-zA-Z%]*")
_BRACE_FIELD: Final = re.compile(r"\{[^{}:]*:[^{}]*\{?")
_DIGITS: Final = re.compile(r"\d+")
_DIGITS_MAX: Final = 9
_PADDING: Final = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDE: Final = frozenset({"center", "indent", "batch", "slice", "wordwrap", "round"})
"""Filters with a number that makes their result longer."""
_SLOW: Final = frozenset({"urlize", "striptags", "wordwrap", "title"})
_STR_REFUSED: Final = frozenset({"encode", "translate", "maketrans", "striptags", "unescape"})
_SHALLOW: Final = frozenset(
    {
        "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject",
        "rejectattr", "reverse", "select", "selectattr", "slice",
    }
)  # fmt: skip
"""Filters that do not read what the items of a list hold."""
_EACH, _JOINED, _MADE, _READ = "each ", "joined ", "made ", "read "
"""Names of filters that no template can write."""


class Sandbox(ImmutableSandboxedEnvironment):
    """See the module. `now` returns the time for `strftime_now`."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._running = threading.local()
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.finalize = self._written
        self.concat = self._concat  # type: ignore[method-assign]
        self.filters["tojson"] = _to_json
        self.filters = {name: self._paid(name, made) for name, made in self.filters.items()}
        self.tests = {name: self._paid_test(test) for name, test in self.tests.items()}
        self.filters |= {
            _EACH: self._each,
            _JOINED: lambda items: self._concat([str(self._read(each)) for each in items]),
            _MADE: self._made,
            _READ: self._read,
        }
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: now().strftime(str(form)[:WIDTH_MAX])
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = dict
        self.globals.pop("lipsum", None)

    @contextmanager
    def budget_of(self, effort: Effort) -> Iterator[Budget]:
        """Give what runs in this thread, until the end of the block, a new budget of `effort`."""
        budget = self._running.budget = Budget(effort)
        try:
            yield budget
        finally:
            del self._running.budget

    @property
    def _budget(self) -> Budget:
        found: Budget = self._running.budget
        return found

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        changed: nodes.Template = _Paying().visit(parsed)
        return changed

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See SandboxedEnvironment."""
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            self._check_form(left, right if isinstance(right, (tuple, Mapping)) else (right,))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check_length(len(left) + len(right))
        return self._made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  # as in Jinja
        """See SandboxedEnvironment."""
        is_shallow = isinstance(__obj, (jinja2.runtime.Macro, jinja2.runtime.LoopContext))
        for each in (*args, *kwargs.values()):
            (__self._budget.take_value if is_shallow else __self._budget.take_all)(each)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            args = __self._checked_method(owner, name, args, kwargs)
        elif isinstance(owner, (list, tuple)):
            __self._budget.take_all(owner)  # its methods compare
        return __self._made(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See SandboxedEnvironment."""
        if isinstance(argument, tuple):
            self._budget.take_all(argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """See SandboxedEnvironment. Methods of numbers and bytes make long bytes of nothing."""
        if isinstance(obj, (int, float, bytes)) or (isinstance(obj, str) and attr in _STR_REFUSED):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        """See SandboxedEnvironment."""
        made = super().wrap_str_format(value)
        if made is None:
            return None
        self._check_braces(str(value.__self__))

        @functools.wraps(made)
        def checked(*args: Any, **kwargs: Any) -> str:
            given = [*args, *kwargs.values()]
            self._check_fields(str(value.__self__).count("{"), given)
            text: str = made(*args, **kwargs)
            return text

        return checked

    def _each(self, items: Any) -> Any:
        """Return what a loop goes through."""
        if hasattr(items, "__len__"):
            self._budget.take(1 + len(items))
            return items
        return self._counted(items)

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for each in items:
            self._budget.take(1)
            yield each

    def _made(self, value: Any) -> Any:
        if isinstance(value, int):
            _check_bits(value.bit_length())
        self._budget.take_value(value)
        return value

    def _read(self, value: Any) -> Any:
        self._budget.take_all(value)
        return value

    def _written(self, value: Any) -> Any:
        """Return an expression that is printed."""
        return value if isinstance(value, str) else self._read(value)

    def _concat(self, pieces: Iterable[str]) -> str:
        pieces = list(pieces)
        self._budget.take(len(pieces))
        self._budget.take_text(sum(map(len, pieces)))
        return "".join(pieces)

    def _paid(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        """Return the filter `name` with a bound of its arguments and of its result."""
        has_context = int(getattr(made, "jinja_pass_arg", None) is not None)

        @functools.wraps(made)
        def paid(*args: Any, **kwargs: Any) -> Any:
            value, given = args[has_context], [*args[has_context + 1 :], *kwargs.values()]
            if name not in _SHALLOW:
                self._budget.take_all(value)
            self._check_filter(name, value, given)
            return self._made(made(*args, **kwargs))

        return paid

    def _paid_test(self, test: Any) -> Callable[..., bool]:
        """Return a test that pays for what it compares."""
        has_context = int(getattr(test, "jinja_pass_arg", None) is not None)

        @functools.wraps(test)
        def paid(*args: Any, **kwargs: Any) -> bool:
            if len(args) + len(kwargs) > has_context + 1:
                for each in (*args[has_context:], *kwargs.values()):
                    self._budget.take_all(each)
            return bool(test(*args, **kwargs))

        return paid

    def _check_filter(self, name: str, value: Any, given: list[Any]) -> None:
        if name in _WIDE:
            for each in given:
                self._check_width(each)
        if name in _SLOW and len(str(value)) > SLOW_CHARACTERS_MAX:
            allowed = f"allowed are {SLOW_CHARACTERS_MAX}"
            raise TemplateError(f"the chat template gives {name} {len(str(value))} characters; {allowed}")
        if name == "format":
            self._check_form(str(value), given)
        elif name in ("tojson", "pprint"):
            self._check_nested(value, given)
        elif name == "sum" and any(isinstance(each, (list, tuple)) for each in given):
            raise TemplateError(
                "the chat template adds lists with sum, which copies the first ones again and again"
            )
        elif name == "replace" and len(given) > 1:
            self._check_replace(str(value), str(given[0]), str(given[1]))
        elif name in ("indent", "wordwrap"):
            longest = max((len(each) if isinstance(each, str) else 1 for each in given), default=1)
            self._check_length(len(str(value)) * longest)
        elif name == "join" and hasattr(value, "__len__"):
            self._check_length(len(value) * len(str(given[0])) if given else 0)

    def _check_nested(self, value: Any, given: list[Any]) -> None:
        """Refuse a value that is printed with one indentation for each level, before it is: levels multiply its length."""
        indent = max(
            (each if isinstance(each, int) else len(each) for each in given if isinstance(each, (int, str))),
            default=1,
        )
        count, depth, level = 0, 0, [value]
        while level:
            count, depth = count + len(level), depth + 1
            level = [held for each in level for held in _items(each)]
            self._budget.take(1 + len(level))
        self._check_length(count * depth * max(indent, 1))

    def _checked_method(
        self, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return the arguments of a method of `text`. Raises TemplateError if it makes a much longer text."""
        given = (*args, *kwargs.values())
        if name in _PADDING:
            for each in given:
                self._check_width(each)
            if name == "expandtabs":
                self._check_length(
                    text.count("\t") * max((each for each in given if isinstance(each, int)), default=8)
                )
        elif name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
            self._check_replace(text, args[0], args[1])
        elif name == "join" and args:
            items = list(self._counted(args[0]))
            self._check_length(
                len(text) * len(items) + sum(len(each) for each in items if isinstance(each, str))
            )
            return (items, *args[1:])
        self._budget.take_text(len(text))
        return args

    def _check_replace(self, text: str, old: str, new: str) -> None:
        self._check_length(len(text) + text.count(old) * max(len(new) - len(old), 0))

    def _check_length(self, length: int) -> None:
        """Refuse a text or a list of `length` before it is made."""
        self._budget.take_text(length)

    def _check_width(self, width: object) -> None:
        if isinstance(width, int) and width > WIDTH_MAX:
            raise TemplateError(f"the chat template pads to {width} characters; allowed are {WIDTH_MAX}")

    def _check_product(self, left: Any, right: Any) -> None:
        for repeated, count in ((left, right), (right, left)):
            if hasattr(repeated, "__len__") and isinstance(count, int):
                self._check_length(len(repeated) * max(count, 0))
                return
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())

    def _check_form(self, form: str, given: Iterable[Any]) -> None:
        """Refuse a form with a large width: "%9999999d", or with a long argument many times."""
        fields = _PERCENT_FIELD.findall(form)
        for field in fields:
            if "*" in field:
                raise TemplateError("the chat template takes a width from an argument")
            self._check_widths(field)
        self._check_fields(len(fields), given.values() if isinstance(given, Mapping) else given)

    def _check_braces(self, form: str) -> None:
        """Refuse a form with a large width, or with one that is an argument: "{:9999999}", "{:{}}"."""
        for field in _BRACE_FIELD.findall(form):
            if field.endswith("{"):
                raise TemplateError("the chat template takes a width from an argument")
            self._check_widths(field)

    def _check_fields(self, count: int, given: Iterable[Any]) -> None:
        longest = 0
        for each in given:
            self._budget.take_all(each)
            for held in each.values() if isinstance(each, Mapping) else (each,):
                longest = max(longest, len(held) if isinstance(held, str) else 0)
        self._check_length(count * longest)

    def _check_widths(self, field: str) -> None:
        for digits in _DIGITS.findall(field):
            self._check_width(int(digits[:_DIGITS_MAX]) if len(digits) <= _DIGITS_MAX else WIDTH_MAX + 1)


class _Paying(NodeTransformer):
    """Changes a parsed template so that it pays for what has no hook."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # Jinja's name
        self.generic_visit(node)
        node.iter = _filtered(_EACH, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(_JOINED, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(_MADE, node) if isinstance(node.arg, nodes.Slice) and node.ctx == "load" else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filtered(_READ, node.key)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        sides = [node.expr, *(each.expr for each in node.ops)]
        if not any(isinstance(each, nodes.Const) for each in sides):
            node.expr = _filtered(_READ, node.expr)
            for each in node.ops:
                each.expr = _filtered(_READ, each.expr)
        return node


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _filtered(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}`, which marks the model's turns for training. Here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # Jinja reads it from the class

    def parse(self, parser: Any) -> Any:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __repr__(self) -> str:
        return "<Namespace>"  # Jinja's own shows all values, as often as they are held

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace has no attribute {name!r}")


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > 64:
        raise TemplateError(f"the chat template indents JSON by {indent}; allowed are 64")
    if isinstance(indent, str) and len(indent) > 64:
        raise TemplateError(f"the chat template indents JSON by {len(indent)} characters; allowed are 64")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))


def _check_bits(bits: int) -> None:
    if bits > NUMBER_BITS_MAX:
        raise TemplateError(f"the chat template makes a number of {bits} bits; allowed are {NUMBER_BITS_MAX}")
