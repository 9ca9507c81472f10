"""The child process that reads guides: a line with form and text in, a line with the fault out, after a first one.

Some short guides take minutes or gigabytes to compile, and the library aborts its process where memory ends. The limits of
this process bound both. `guide_check` starts it again. It ends with its stdin.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any, Final

import llguidance

from services.frontend.surface.guide_limits import MEMORY_BYTES_MAX, SECONDS_MAX

_JSON: Final[Any] = {"whitespace_flexible": False}
"""As in engines: spaces between the tokens of JSON would have no end."""


def fault_of(kind: str, text: str) -> str:
    """Return why no output can be as `text` says, computed over a vocabulary of bytes. Empty: one can.

    `kind`: "json_schema" or "regex".
    """
    matcher = llguidance.LLMatcher
    try:
        if kind == "json_schema":
            grammar = matcher.grammar_from_json_schema(text, defaults=_JSON)
        else:
            grammar = matcher.grammar_from_regex(text)
    except (ValueError, RecursionError) as error:
        return str(error) or type(error).__name__
    if reason := matcher.validate_grammar(grammar):
        return str(reason)
    made = matcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    if not made.is_error():
        made.compute_bitmask()
    if not made.is_error():
        return ""
    reason = str(made.get_error())
    return "no output can meet it" if reason.startswith("NoExtensionBias") else reason


def main() -> None:
    """Answer until stdin ends, within the limits."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + MEMORY_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _say("ready")
    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS_MAX)
        fault = fault_of(kind, text)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _say(fault[:2000])


def _say(text: str) -> None:
    sys.stdout.buffer.write(json.dumps(text).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
