"""Renders a chat template once, in a child process with bounded time and memory, before a mesh trusts it.

The child renders the longest dialogues that fit the context. A template that loops, or that makes huge texts, ends the
child alone. `python -m kvmesh.models.template_check` is the child: JSON on stdin, one line of JSON on stdout.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from kvmesh.models.chat_template import ChatTemplate
from kvmesh.models.template_budget import MESSAGES_MAX, TemplateError, TemplateTooLong, TemplateTooSlow

SECONDS_MAX: Final = 2
"""CPU time of the renderings."""
MEMORY_BYTES_MAX: Final = 256 << 20
"""Memory of the child above what it has before it renders."""

_WALL_S: Final = 60.0
"""Last resort on a machine that gives the child no processor time."""
_TURN_TOKENS_MIN: Final = 4
"""Tokens of the shortest turn: its role, its borders and its text."""
_CHARACTERS_PER_TOKEN: Final = 4
_TOOLS: Final = 64
_ROOT: Final = Path(__file__).resolve().parents[2]


class TemplateCheck:
    """A check that runs. `begin` starts the child, `result` waits for it, `close` ends it."""

    def __init__(self, process: subprocess.Popen[str], question: str) -> None:
        self._process = process
        self._question = question

    @classmethod
    def begin(
        cls, source: str, variables: Mapping[str, str], context_tokens: int, text_max: int
    ) -> TemplateCheck:
        """Start the child for one template. `text_max`: most characters of a rendered text."""
        question = json.dumps([source, dict(variables), context_tokens, text_max])
        process = subprocess.Popen(
            [sys.executable, "-m", "kvmesh.models.template_check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=_ROOT,
            env={"PYTHONPATH": str(_ROOT)},  # a template gets nothing of this process
        )
        return cls(process, question)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child, whatever it does, and wait for it. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def result(self) -> str:
        """Return why the template is refused, as the end of a sentence; empty: it is not."""
        try:
            answer, _ = self._process.communicate(self._question, timeout=_WALL_S)
        except subprocess.TimeoutExpired:
            self.close()
            return f"it was not rendered in {_WALL_S:g} s"
        if self._process.returncode == -signal.SIGVTALRM:
            return f"it takes more than {SECONDS_MAX} s of CPU time for a dialogue that fits the context"
        if self._process.returncode:
            return f"rendering it ended the process with status {self._process.returncode}"
        return str(json.loads(answer))


def dialogues(context_tokens: int, text_max: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dialogues that are rendered, each with a name: a plain one, then the longest ones."""
    yield "one message", {"messages": [_message("user", "Hi")]}
    turns = max(1, min(context_tokens // _TURN_TOKENS_MIN, MESSAGES_MAX, text_max))
    turns -= (turns + 1) % 2  # an odd number ends with the user
    many = [_message("assistant" if index % 2 else "user", "Hi") for index in range(turns)]
    yield f"{turns} messages", {"messages": many}
    length = max(1, min(context_tokens * _CHARACTERS_PER_TOKEN, text_max // 2))
    long = ("word " * (length // 5 + 1))[:length]
    yield f"a message of {length} characters", {"messages": [_message("user", long)]}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "weather", "description": "Weather of a city.", "parameters": parameters}
    tools = [{"type": "function", "function": function}] * _TOOLS
    yield f"{_TOOLS} tools", {"messages": [_message("user", "Hi")], "tools": tools}


def answer(source: str, variables: Mapping[str, str], context_tokens: int, text_max: int) -> str:
    """Render the dialogues here; return why the template is refused, or an empty text.

    A dialogue that the template refuses by itself is no fault, except one message of a user, with or without a system turn.
    """
    try:
        template = ChatTemplate(source, variables, text_max=text_max)
    except TemplateError as error:
        return str(error)
    for name, asked in dialogues(context_tokens, text_max):
        try:
            template.render(asked["messages"], tools=asked.get("tools"))
        except (TemplateTooLong, TemplateTooSlow) as error:
            return f"{error} (for {name})"
        except TemplateError as error:
            if "memory" in str(error) or (name == "one message" and not _takes_system(template)):
                return f"{error} (for {name})"
    return ""


def _takes_system(template: ChatTemplate) -> bool:
    try:
        template.render([_message("system", "Be brief."), _message("user", "Hi")])
    except TemplateError:
        return False
    return True


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _limit() -> None:
    """Bound time and memory of this process from here on."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    size = pages * resource.getpagesize() + MEMORY_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS_MAX)


if __name__ == "__main__":
    source, variables, context_tokens, text_max = json.load(sys.stdin)
    _limit()
    try:
        said = answer(source, variables, context_tokens, text_max)
    except MemoryError:
        said = f"it needs more than {MEMORY_BYTES_MAX >> 20} MB"
    sys.stdout.write(json.dumps(said))
