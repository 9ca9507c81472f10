"""Splits the charge of a request between its executions: the part that a dead execution owes.

Pure. settle_execution.lua splits the charge between executions that report. The charge of a request with one execution is
not split.

A successor continues the output of an earlier execution, its predecessor. The predecessor pays for its own part of that
output, and for the prompt if it is no successor itself. A successor that reports first leaves this amount for its
predecessor alone. An execution that never reports has died: its reservation is charged the amount that was left for it
(see EarlierExecution).
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
    """Return each of `earlier` with its maximum charge in tokens, if it has died.

    A later execution continued behind `received` tokens and reached output position `output_tokens`. If `is_successor`, it
    leaves the prompt and the received tokens to its predecessor; any other execution pays from the beginning. Each of
    `earlier` pays for the output that it gave beyond `output_tokens`, each token once.
    """
    found, reach = list[tuple[EarlierExecution, int]](), output_tokens
    for each in sorted(earlier, key=lambda one: one.given):
        tokens = max(0, each.given - max(reach, each.inherited))
        if is_successor and each.is_predecessor:
            tokens += max(0, (0 if each.inherited else prompt_tokens) + received - each.inherited)
        reach = max(reach, each.given)
        found.append((each, tokens))
    return found
