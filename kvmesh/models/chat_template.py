"""A model's chat template: messages to text, by Jinja in a sandbox, with the globals that transformers gives templates.

A template comes with the model, so it is not trusted. It cannot reach attributes of Python (jinja2.sandbox), and cannot
change its arguments. Each operation that makes a long text from a short one is bounded, and so is the rendered text.
A template that loops is found at start (kvmesh.models.template_check).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.utils
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

RANGE_MAX: Final = 100_000
"""Longest range of a loop, as in Jinja's own sandbox."""

WIDTH_MAX: Final = 10_000
"""Largest padding, indentation or precision."""

NUMBER_BITS_MAX: Final = 1024
"""Largest number that arithmetic of a template makes."""

_PERCENT_FIELD: Final = re.compile(r"%[^a-zA-Z%]*")
_BRACE_FIELD: Final = re.compile(r"\{[^{}:]*:[^{}]*\{?")
_DIGITS: Final = re.compile(r"\d+")
_DIGITS_MAX: Final = 9
_PADDING: Final = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})


class TemplateError(ValueError):
    """The template cannot be used, or refuses these messages. The text is one sentence."""


class TemplateTooLong(TemplateError):
    """The rendered text is longer than allowed."""


class ChatTemplate:
    """One compiled template. Immutable; safe to use from several threads.

    `variables` are the special tokens by name. `now` returns the time for `strftime_now`.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        *,
        text_max: int,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`text_max`: most characters of a rendered text. Raises TemplateError if the template cannot be compiled."""
        self.source = source
        self._variables = dict(variables)
        self._text_max = text_max
        try:
            self._template = _Environment(text_max, now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from None
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, OverflowError) as error:
            raise TemplateError(f"{type(error).__name__}: {_sentence(error)}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a conversation. Raises TemplateError with the template's own reason, if it has one."""
        values = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
            **(arguments or {}),
        }
        pieces: list[str] = []
        left = self._text_max
        try:
            for piece in self._template.generate(values):
                left -= len(piece)
                if left < 0:
                    raise TemplateTooLong(
                        f"the chat template makes a text of more than {self._text_max} characters"
                    )
                pieces.append(piece)
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses the messages: {_sentence(error)}") from None
        except RecursionError:
            raise TemplateError("the chat template calls itself without end") from None
        except MemoryError:
            raise TemplateError("the chat template needs too much memory") from None
        except Exception as error:  # noqa: BLE001  # a template may do anything to its arguments
            what = f"{type(error).__name__}: {_sentence(error)}"
            raise TemplateError(f"the chat template fails on these messages: {what}") from None
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on what one operation makes."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, text_max: int, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._text_max = text_max
        self.filters["tojson"] = _to_json
        for name in ("center", "indent"):
            self.filters[name] = self._with_width(self.filters[name])
        self.filters["format"] = self._with_form(self.filters["format"])
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: now().strftime(str(form)[:WIDTH_MAX])
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = dict
        self.globals.pop("lipsum", None)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See SandboxedEnvironment."""
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            self._check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            self._check_form(left)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  # as in Jinja
        """See SandboxedEnvironment."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            __self._check_method(owner, name, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """See SandboxedEnvironment."""
        made = super().wrap_str_format(value)
        if made is not None:
            self._check_braces(str(value.__self__))
        return made

    def _check_method(self, text: str, name: str, args: tuple[Any, ...]) -> None:
        """Refuse a call of a method of `text` that makes a much longer one."""
        if name in _PADDING:
            for each in args:
                self._check_width(each)
        elif name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
            self._check_length(len(text) + text.count(args[0]) * (len(args[1]) - len(args[0])))
        elif name == "join" and args and hasattr(args[0], "__len__"):
            self._check_length(len(text) * max(len(args[0]) - 1, 0))

    def _with_width(self, made: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(made)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for each in (*args[1:], *kwargs.values()):
                self._check_width(each)
            return made(*args, **kwargs)

        return checked

    def _with_form(self, made: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(made)
        def checked(form: Any, *args: Any, **kwargs: Any) -> Any:
            self._check_form(str(form))
            return made(form, *args, **kwargs)

        return checked

    def _check_length(self, length: int) -> None:
        if length > self._text_max:
            raise TemplateTooLong(
                f"the chat template makes a text of {length} characters; allowed are {self._text_max}"
            )

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

    def _check_power(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))

    def _check_form(self, form: str) -> None:
        """Refuse a form with a large width: "%9999999d"."""
        for field in _PERCENT_FIELD.findall(form):
            if "*" in field:
                raise TemplateError("the chat template takes a width from an argument")
            self._check_widths(field)

    def _check_braces(self, form: str) -> None:
        """Refuse a form with a large width, or with one that is an argument: "{:9999999}", "{:{}}"."""
        for field in _BRACE_FIELD.findall(form):
            if field.endswith("{"):
                raise TemplateError("the chat template takes a width from an argument")
            self._check_widths(field)

    def _check_widths(self, field: str) -> None:
        for digits in _DIGITS.findall(field):
            self._check_width(int(digits[:_DIGITS_MAX]) if len(digits) <= _DIGITS_MAX else WIDTH_MAX + 1)


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
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > 64:
        raise TemplateError(f"the chat template indents JSON by {indent}; allowed are 64")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _check_bits(bits: int) -> None:
    if bits > NUMBER_BITS_MAX:
        raise TemplateError(f"the chat template makes a number of {bits} bits; allowed are {NUMBER_BITS_MAX}")


def _sentence(error: BaseException) -> str:
    """Return the first line of the error's text, without an end."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300].rstrip(".")
