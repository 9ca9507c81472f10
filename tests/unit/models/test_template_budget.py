"""What one rendering may take: a template that is harmless at start may explode for the messages of a client."""

from __future__ import annotations

import json

import pytest

from kvmesh.models.chat_template import ChatTemplate, words_of
from kvmesh.models.template_budget import Budget, Effort, TemplateError, TemplateTooLong, TemplateTooSlow

HI = [{"role": "user", "content": "Hi"}]
SMALL = Effort(characters=1 << 20, steps=30_000)
TREE = (
    "{% set n = namespace(x=[1], y=[1]) %}"
    "{% for i in range(90) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)
"""Two lists of 90 levels, each of which holds the one below twice."""
TUPLES = "{% set n = namespace(x=(1,)) %}{% for i in range(90) %}{% set n.x = (n.x, n.x) %}{% endfor %}"
BIG = "{% set n = 'ab' * 400000 %}"


def render(source: str, effort: Effort = SMALL) -> str:
    return ChatTemplate(source, {}, text_max=1 << 20).render(HI, effort=effort)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(999) | map('string') %}{% for b in range(999) | map('string') %}{% endfor %}{% endfor %}",
        "{% for i in range(messages[0].content | length * 40000) %}{{ i }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [[1]] recursive %}{{ loop([x, x]) }}{% endfor %}",
        TREE + "{{ n.x }}",
        TREE + "{{ n.x | tojson }}",
        TREE + "{{ n.x | string }}",
        TREE + "{{ '' ~ n.x }}",
        TREE + "{{ '%s' % (n.x,) }}",
        TREE + "{{ '%s' | format(n.x) }}",
        TREE + "{{ '{}'.format(n.x) }}",
        TREE + "{{ [n.x] | join }}",
        TREE + "{{ n.x == n.y }}",
        TREE + "{{ n.x is eq(n.y) }}",
        TREE + "{{ [n.x] | select('in', [n.y]) | list }}",
        TREE + "{{ [n.x].index(n.y) }}",
        TREE + "{{ [n.x, n.y] | max }}",
        TREE + "{{ raise_exception(n.x) }}",
        TREE + "{{ dict(a=n.x).items() }}",
        TUPLES + "{{ {n.x: 1} }}",
        TUPLES + "{{ {1: 1}[n.x] }}",
        BIG + "{% for i in range(9999) %}{% set x = n[1:] %}{% endfor %}",
        BIG + "{% for i in range(9999) %}{% set x = n | upper %}{% endfor %}",
        BIG + "{% for i in range(9999) %}{% set x = n.upper() %}{% endfor %}",
        BIG + "{% for i in range(9999) %}{% set x = n + 'a' %}{% endfor %}",
        BIG + "{{ n | list | length }}",
        BIG + "{{ n.split('a') | length }}",
        "{% for i in range(9999) %}{{ range(9999) | list | length }}{% endfor %}",
    ],
)
def test_no_template_takes_more_steps_than_it_has(source: str) -> None:
    """Loops, and trees of lists that are written, compared or hashed."""
    with pytest.raises(TemplateError) as caught:
        render(source)
    assert isinstance(caught.value, TemplateTooSlow) or "calls itself" in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% set n = namespace(x='a') %}{% for i in range(90) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(90) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
        "{{ ('a' * 10000) | replace('a', 'b' * 10000) }}",
        "{{ range(9999) | join('a' * 9999) }}",
        "{{ ''.join(['a' * 99999] * 20) }}",
        "{{ ('\t' * 100000).expandtabs(10000) }}",
        "{{ ('{0}' * 9999).format('a' * 9999) }}",
        "{{ '{a}{a}{a}'.format_map({'a': 'a' * 999999}) }}",
        "{{ ('%(a)s' * 9999) % {'a': 'a' * 9999} }}",
        "{{ ('%(a)s' * 9999) | format(a='a' * 9999) }}",
        "{{ ('a\n' * 9999) | indent('x' * 9999) }}",
        "{{ ('a b ' * 999) | wordwrap(1, wrapstring='x' * 9999) }}",
    ],
)
def test_no_operation_makes_a_text_that_is_too_long(source: str) -> None:
    """It is refused before it takes memory."""
    with pytest.raises(TemplateTooLong):
        render(source, Effort(characters=1 << 20, steps=300_000))


NESTED = "{% set ns = namespace(x=range(2000) | list) %}{% for i in range(100) %}{% set ns.x = [ns.x] %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ ['a'] | batch(10**9, 'x') | list }}", "pads to 1000000000"),
        ("{{ ['a'] | slice(10**9, 'x') | list }}", "pads to 1000000000"),
        ("{{ ('<' * 99999) | striptags }}", "gives striptags 99999 characters"),
        ("{{ ('a.b ' * 9999) | urlize }}", "gives urlize"),
        ("{{ 'a'.encode().ljust(10**9) }}", "'encode' of 'str' object is unsafe"),
        ("{{ (1).to_bytes(10**9, 'big') }}", "'to_bytes' of 'int' object is unsafe"),
        ("{{ 'a'.translate({97: 'b' * 9999}) }}", "'translate' of 'str' object is unsafe"),
        ("{{ [] | tojson(indent='x' * 99) }}", "indents JSON by 99 characters"),
        ("{{ raise_exception('x' * 99999) }}", "x" * 300),
        ("{{ 1.0 | round(5000000, 'floor') }}", "pads to 5000000"),
        ("{{ ('f' * 300000) | int(0, 16) // 3 }}", "a number of 1200000 bits"),
        ("{{ range(9) | batch(1) | sum(start=[]) }}", "adds lists with sum"),
        (f"{NESTED}{{{{ ns.x | tojson(indent=64) | length }}}}", "makes a text of"),
    ],
)
def test_wide_and_slow_operations_are_refused(source: str, reason: str) -> None:
    """With a sentence that is short."""
    with pytest.raises(TemplateError) as caught:
        render(source)
    assert reason in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("indent", ["indent=64", "indent=' ' * 64"])
def test_nested_json_is_refused_before_it_is_written(indent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each level of it indents all that it holds."""
    monkeypatch.setattr(json, "dumps", None)
    with pytest.raises(TemplateTooLong, match="makes a text of"):
        render(f"{NESTED}{{{{ ns.x | tojson({indent}) }}}}")


def test_a_namespace_does_not_show_what_it_holds() -> None:
    """It may hold another one twice, and that one, too."""
    source = "{% set n = namespace(x=1) %}{% for i in range(90) %}{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}"
    assert render(source + "{{ n.x }}") == "<Namespace>"


def test_constants_are_bounded_when_the_template_is_compiled() -> None:
    """Jinja computes them then."""
    source = "{{ " + " ~ ".join(["('a' * 900000)"] * 9) + " }}"
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}, text_max=1 << 20).render(HI)


def test_a_rendering_ends_when_its_time_is_over() -> None:
    """Whatever single operations take; the clock is read once in 64 calls."""
    now = iter([0.0, 1.0, 3.0])
    budget = Budget(Effort(9, seconds=2.0), lambda: next(now))
    for _ in range(127):
        budget.take(1)
    with pytest.raises(TemplateTooSlow, match="more than 2 s"):
        budget.take(1)


def test_each_rendering_has_a_budget_of_its_own() -> None:
    """A thousand renderings of one template take no more than one."""
    template = ChatTemplate("{% for i in range(99) %}{% endfor %}x", {}, text_max=9)
    for _ in range(100):
        assert template.render(HI, effort=Effort(9, 200)) == "x"


def test_the_words_of_a_template_are_its_names_and_strings() -> None:
    """Its text is not among them."""
    found = words_of("don't {{ m.role == 'user' }}{% if x %}<|end|>{% endif %}")
    assert {"m", "role", "user", "x"} <= found and not found & {"end", "don", "<|end|>"}
    assert words_of("{{ '") == frozenset()
