"""The list of all checks, in the order of the table."""

from __future__ import annotations

from kvmesh.conformance.check import Check
from kvmesh.conformance.checks import (
    answer_checks,
    cache_checks,
    error_checks,
    handoff_checks,
    load_checks,
    model_checks,
    sampling_checks,
    step_checks,
)


def all_checks(cancels: int) -> tuple[Check, ...]:
    """Return the checks. `cancels`: calls that are cancelled at random moments."""
    return (
        *model_checks.CHECKS,
        *answer_checks.CHECKS,
        *step_checks.CHECKS,
        *load_checks.CHECKS,
        *((load_checks.random_cancels(cancels),) if cancels else ()),
        *cache_checks.CHECKS,
        *handoff_checks.CHECKS,
        *sampling_checks.CHECKS,
        *error_checks.CHECKS,
    )
