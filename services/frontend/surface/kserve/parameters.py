"""Parameters of a ModelInferRequest: Triton's, and those of the mesh. Pure.

Source: triton-inference-server/server, docs/protocol/extension_{parameters,schedule_policy,sequence}.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvmesh.errors import MeshError, Violation, invalid
from services.frontend.surface.kserve.asked import Asked
from services.frontend.surface.kserve.tensors import refused

EMPTY_FINAL: Final = "triton_enable_empty_final_response"
FINAL: Final = "triton_final_response"

PRIORITY_LOWEST: Final = 201
"""Triton's priority of the mesh's -100. Its 1, the highest, is the mesh's 100."""

TIMEOUT_US_MAX: Final = 3_600_000_000


def take(asked: Asked, parameters: Mapping[str, Any]) -> None:
    """Put the parameters of a request into `asked`. Raises MeshError with the parameter's name."""
    for name, parameter in parameters.items():
        found = _PARAMETERS.get(name)
        if found is None:
            known = ", ".join(sorted(_PARAMETERS))
            what = Violation(f"parameters[{name[:64]!r}]", "unknown", f"one of {known}")
            raise invalid("FIELD_UNKNOWN", [what])
        found(asked, f"parameters[{name!r}]", parameter)


def _text(name: str, parameter: Any) -> str:
    if parameter.WhichOneof("parameter_choice") != "string_param":
        raise _of_type(name, parameter, "a string_param")
    return str(parameter.string_param)


def _flag(name: str, parameter: Any) -> bool:
    if parameter.WhichOneof("parameter_choice") != "bool_param":
        raise _of_type(name, parameter, "a bool_param")
    return bool(parameter.bool_param)


def _number(name: str, parameter: Any, least: int, most: int, unit: str = "") -> int:
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in ("int64_param", "uint64_param"):
        raise _of_type(name, parameter, "an int64_param or a uint64_param")
    value = int(getattr(parameter, kind))
    if not least <= value <= most:
        raise refused(name, f"{value}{unit}", f"{least} to {most}{unit}")
    return value


def _of_type(name: str, parameter: Any, allowed: str) -> MeshError:
    return refused(
        name, f"a {parameter.WhichOneof('parameter_choice') or 'parameter without a value'}", allowed
    )


def _priority(asked: Asked, name: str, parameter: Any) -> None:
    value = _number(name, parameter, 0, PRIORITY_LOWEST)
    if value:  # 0 is the default, in Triton as in the mesh
        asked.request.limits.priority = (PRIORITY_LOWEST + 1) // 2 - value


def _timeout(asked: Asked, name: str, parameter: Any) -> None:
    value = _number(name, parameter, 0, TIMEOUT_US_MAX, " us")
    if value:
        asked.deadline_s = value / 1e6


def _ttft_timeout(asked: Asked, name: str, parameter: Any) -> None:
    milliseconds = _number(name, parameter, 1, 3_600_000, " ms")
    asked.request.limits.ttft_timeout.FromMilliseconds(milliseconds)


def _session(asked: Asked, name: str, parameter: Any) -> None:
    asked.request.session_id = _text(name, parameter)


def _key(asked: Asked, name: str, parameter: Any) -> None:
    asked.request.idempotency_key = _text(name, parameter)


def _tenant(asked: Asked, name: str, parameter: Any) -> None:
    asked.tenant = _text(name, parameter)


def _empty_final(asked: Asked, name: str, parameter: Any) -> None:
    asked.wants_empty_final = _flag(name, parameter)


def _nothing(_: Asked, __: str, ___: Any) -> None:
    # It shapes answers over HTTP alone.
    return


def _no_sequence(_: Asked, name: str, parameter: Any) -> None:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is not None and getattr(parameter, kind):
        raise refused(
            name, "set", "unset: the models have no state of sequences; session_id names a conversation;"
        )


_PARAMETERS: Final[Mapping[str, Callable[[Asked, str, Any], None]]] = {
    "priority": _priority,
    "timeout": _timeout,
    "ttft_timeout_ms": _ttft_timeout,
    "session_id": _session,
    "idempotency_key": _key,
    "tenant": _tenant,
    EMPTY_FINAL: _empty_final,
    "binary_data_output": _nothing,
    "sequence_id": _no_sequence,
    "sequence_start": _no_sequence,
    "sequence_end": _no_sequence,
}
NAMES: Final = frozenset(_PARAMETERS)
"""Names of all parameters."""
