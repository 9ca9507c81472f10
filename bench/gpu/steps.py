"""What a decode step costs by streams and context: s0 + s1 streams + s2 tokens of context over all streams. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.gpu.form import Errors, errors_of
from bench.gpu.recording import Step


class StepFit(NamedTuple):
    """The line, how far it is off, and how far one constant time for all steps is off."""

    base_s: float
    stream_s: float
    token_s: float
    errors: Errors
    constant_s: float
    constant_errors: Errors


def fit_steps(steps: Sequence[Step]) -> StepFit:
    """Return the least squares of relative errors; the constant is the geometric middle of the extremes."""
    seconds = np.array([step.median_s for step in steps])
    rows = np.array([(1.0, step.batch, step.batch * step.context) for step in steps])
    base, stream, token = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(steps)), rcond=None)[0]
    line = rows @ np.array([base, stream, token])
    constant = float(np.sqrt(seconds.min() * seconds.max()))
    return StepFit(
        float(base),
        float(stream),
        float(token),
        errors_of(list(line / seconds - 1)),
        constant,
        errors_of(list(constant / seconds - 1)),
    )
