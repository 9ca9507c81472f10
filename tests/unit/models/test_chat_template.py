"""Chat templates: what templates may use, and what a hostile one cannot do."""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import Any

import pytest

from kvmesh.models.chat_template import ChatTemplate
from kvmesh.models.template_budget import TemplateError, TemplateTooLong
from kvmesh.models.template_check import TemplateCheck
from tools.model_goldens.folders import template

HI = [{"role": "user", "content": "Hi"}]
NOW = datetime(2026, 11, 28, 12, 30)  # noqa: DTZ001  # templates print local time


def render(source: str, text_max: int = 1_000_000, **asked: Any) -> str:
    """Render `source` for one message, or for `messages`."""
    template = ChatTemplate(source, {"bos_token": "<s>"}, text_max=text_max, now=lambda: NOW)
    return template.render(asked.pop("messages", HI), **asked)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] | trim }}{% endfor %}",
            "<s>user:Hi",
        ),
        ("{% if true %}\n  a\n{% endif %}\nb", "  a\nb"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "Hi"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ strftime_now('%d %b %Y') }}", "28 Nov 2026"),
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        (
            "{% set ns = namespace(x=1) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}",
            "2",
        ),
        ("{{ dict(a=1).items() | list }}", "[('a', 1)]"),
        ("{{ tools }} {{ documents }} {{ add_generation_prompt }}", "None None True"),
        ("{{ messages[0].get('name') }}{{ messages[0].tool_calls is defined }}", "NoneFalse"),
        ("{{ '%s-%5.1f' % ('a', 2) }} {{ '{:>4}'.format(7) }} {{ 'ab'.center(6) }}", "a-  2.0    7   ab  "),
    ],
)
def test_templates_have_what_transformers_gives_them(source: str, text: str) -> None:
    """Globals, filters, tags, and the trimming of blocks."""
    assert render(source) == text


def test_arguments_and_tools_are_variables() -> None:
    """A further variable may hide a special token, as in transformers."""
    source = "{{ bos_token }}{{ enable_thinking }}{{ tools | length }}"
    assert render(source, tools=[{}, {}], arguments={"enable_thinking": False}) == "<s>False2"
    assert render(source, tools=[], arguments={"bos_token": "x"}) == "x0"


def test_the_reason_of_a_template_is_kept() -> None:
    """`raise_exception` is how a template refuses messages."""
    with pytest.raises(TemplateError, match="refuses the messages: System role not supported"):
        render(template("gemma"), messages=[{"role": "system", "content": "x"}, *HI])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__closure__[0].cell_contents }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{{ self._TemplateReference__context.environment.filters }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].pop('role') }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ namespace(__init__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{% extends messages %}",
    ],
)
def test_nothing_of_python_is_reached_and_no_argument_changes(source: str) -> None:
    """The attempt is refused, or shows nothing."""
    messages = [{"role": "user", "content": "Hi"}]
    with contextlib.suppress(TemplateError):
        assert render(source, messages=messages) in ("", "{}")
    assert messages == HI


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ [1] * 10**9 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a'.zfill(width=10**9) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ 'a\nb' | indent(10**9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%.999999999f' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ 'a'.replace('a', 'b' * 999999).replace('b', 'c' * 999999) }}",
        "{{ ('a' * 99999).join(range(99999) | list) }}",
        "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ {} | tojson(indent=10**9) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% for m in range(1000) %}{{ 'a' * 9999 }}{% endfor %}",
    ],
)
def test_no_single_operation_makes_a_huge_text(source: str) -> None:
    """Each is refused before it takes memory."""
    with pytest.raises(TemplateError):
        render(source)


def test_the_rendered_text_is_bounded() -> None:
    """The bound is that of the message."""
    assert len(render("{% for m in messages %}{{ m.content }}{% endfor %}", 4, messages=HI * 2)) == 4
    with pytest.raises(TemplateTooLong, match="more than 4 characters"):
        render("{% for m in messages %}{{ m.content }}{% endfor %}", 4, messages=HI * 3)


@pytest.mark.parametrize(
    ("source", "reason"), [("{% if %}", "line 1"), ("a\n{{ x", "line 2"), ("{% if 1 %}" * 3000, "recursion")]
)
def test_a_broken_template_is_refused_with_its_line(source: str, reason: str) -> None:
    """Before any message comes."""
    with pytest.raises(TemplateError, match=reason):
        ChatTemplate(source, {}, text_max=100)


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLINGS = (
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
)


def check(source: str, context_tokens: int = 4096) -> str:
    """Return the reason of the check, or an empty text."""
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    return TemplateCheck.begin(source, variables, context_tokens, 16 << 20).result()


@pytest.mark.parametrize("context_tokens", [131_072, 10_000_000])
@pytest.mark.parametrize("family", ["llama-2", "llama-3", "mistral", "qwen", "gemma"])
def test_the_check_takes_templates_of_known_families(family: str, context_tokens: int) -> None:
    """With a context of 128 K tokens, and with the longest known one."""
    assert check(template(family), context_tokens) == ""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than 2000000 steps",
        ),
        (
            "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "allowed are 16777216",
        ),
        ("{% for m in messages %}{{ 'a' * 99999 }}{% endfor %}", "more than 16777216 characters"),
        ("{{ raise_exception('never') }}", "never"),
        (
            "{% if messages | length > 9 %}" + LOOPS + "{% endif %}",
            "more than 2000000 steps",
        ),
        (
            "{% if tools %}" + DOUBLINGS + "{% endif %}",
            "allowed are 16777216",
        ),
        ("{% if %}", "line 1"),
    ],
)
def test_the_check_ends_a_hostile_template(source: str, reason: str) -> None:
    """The child dies alone, and the sentence says why."""
    assert reason in check(source)


def test_a_template_that_needs_a_system_turn_is_taken() -> None:
    """Only a template that refuses every user is refused."""
    source = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[1].content }}"
    )
    assert check(source) == ""
