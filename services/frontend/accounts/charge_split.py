"""Splits the charge of a request between its executions: the part that a dead execution owes.

Pure. settle_execution.lua does the same for the executions that report. A request with one execution needs neither.

A successor continues the output of an earlier execution, its predecessor. The predecessor pays for that output and for the
prompt, whenever it reports. A successor that reports first leaves that amount for its predecessor alone. An execution that
never reports has died: its reservation is charged what was left for it (see EarlierExecution).
"""

from __future__ import annotations

from collections.abc import Iterable

from services.frontend.requests.request_spec import EarlierExecution


def dues(
    earlier: Iterable[EarlierExecution],
    prompt_tokens: int,
    received: int,
    output_tokens: int,
    *,
    is_successor: bool,
) -> list[tuple[EarlierExecution, int]]:
    """Return the maximum charge of each of `earlier` if it has died, beside a later execution of the request.

    The later execution continued behind `received` tokens and reached `output_tokens`. A successor leaves the prompt and
    the received tokens to its predecessor; any other execution pays from the beginning. An earlier execution pays for the
    output that it gave beyond, each token once.
    """
    found, reach = list[tuple[EarlierExecution, int]](), output_tokens
    for each in sorted(earlier, key=lambda one: one.given):
        tokens = max(0, each.given - max(reach, each.inherited))
        if is_successor and each.is_predecessor:
            tokens += max(0, (0 if each.inherited else prompt_tokens) + received - each.inherited)
        reach = max(reach, each.given)
        found.append((each, tokens))
    return found
