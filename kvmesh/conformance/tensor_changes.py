"""Changes of a call's input tensors, for input that kvmesh itself never sends. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferInput

Change = Callable[[list[InferInput]], list[InferInput]]


def replaced(name: str, datatype: str, values: npt.NDArray[Any]) -> Change:
    """Return the change that sends `values` as the input `name`, whether the call has it or not."""
    tensor = InferInput(name, list(values.shape), datatype)
    tensor.set_data_from_numpy(values)
    return lambda inputs: [*(each for each in inputs if each.name() != name), tensor]


def without(name: str) -> Change:
    """Return the change that leaves the input `name` out."""
    return lambda inputs: [each for each in inputs if each.name() != name]


def scalar(name: str, value: int) -> Change:
    """Return the change that sends an INT32."""
    return replaced(name, "INT32", np.array([[value]], dtype=np.int32))


def chained(*changes: Change) -> Change:
    """Return the changes, one after the other."""

    def changed(inputs: list[InferInput]) -> list[InferInput]:
        for change in changes:
            inputs = change(inputs)
        return inputs

    return changed


def flags(offered: Collection[str], **values: bool) -> Change:
    """Return the change that sends these BOOL inputs, as far as they are in `offered`."""
    return chained(
        *(
            replaced(name, "BOOL", np.array([[value]], dtype=np.bool_))
            for name, value in values.items()
            if name in offered
        )
    )
