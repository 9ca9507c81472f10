"""A model's chat template: messages to text, by Jinja in a sandbox, with the globals that transformers gives templates.

A template comes with the model, so it is not trusted. It cannot reach attributes of Python (jinja2.sandbox), and cannot
change its arguments. Each operation that makes a long text from a short one is bounded, and so is the rendered text.
Each rendering has a budget, because a client's messages choose how often a template loops. A template that always loops is
found at start (kvmesh.models.template_check).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from kvmesh.models.template_budget import Effort, TemplateError, TemplateTooLong
from kvmesh.models.template_sandbox import COMPILE_STEPS_MAX, Sandbox


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
        self._effort = Effort(text_max)
        self._sandbox = Sandbox(now)
        try:
            with self._sandbox.budget_of(Effort(text_max, COMPILE_STEPS_MAX)):
                self._template = self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {_sentence(error)}") from None
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, OverflowError) as error:
            raise TemplateError(f"{type(error).__name__}: {_sentence(error)}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        effort: Effort | None = None,
    ) -> str:
        """Return the text of a conversation. Raises TemplateError with the template's own reason, if it has one.

        `effort`: less than that of the template, for a caller that must not wait long.
        """
        effort = effort or self._effort
        values = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
            **(arguments or {}),
        }
        try:
            with self._sandbox.budget_of(effort) as budget:
                pieces, left = [], effort.characters
                for piece in self._template.generate(values):
                    left -= len(piece)
                    if left < 0:
                        allowed = f"more than {effort.characters} characters"
                        raise TemplateTooLong(f"the chat template makes a text of {allowed}")
                    budget.take(1)
                    pieces.append(piece)
                return "".join(pieces)
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


def words_of(source: str) -> frozenset[str]:
    """Return the names and strings in the code of a template: texts of a client that it can tell apart."""
    try:
        found = [(kind, text) for _, kind, text in jinja2.Environment().lex(source)]
    except (jinja2.TemplateError, RecursionError):
        return frozenset()  # compiling it says why
    return frozenset(text.strip("'\"") for kind, text in found if kind in ("name", "string"))


def _sentence(error: BaseException) -> str:
    """Return the first line of the error's text, without an end."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300].rstrip(".")
