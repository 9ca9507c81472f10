"""Translation of a ModelInferRequest into a GenerateRequest, or into the error that its client gets. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.message import DecodeError

from kvmesh.errors import MeshError, Violation, invalid
from services.frontend.surface import wire
from services.frontend.surface.kserve import parameters, tensors
from services.frontend.surface.kserve.asked import Asked, Contract, Inference
from services.frontend.surface.kserve.protocol import service_pb2
from services.frontend.surface.kserve.served_models import ServedModels

FIELDS_MAX: Final = 4_096
"""Fields of a message, those of its tensors and parameters included."""

ID_CHARACTERS_MAX: Final = 1_024
"""Each response repeats the id."""

MODEL_CHARACTERS_MAX: Final = 256
"""Each response repeats the name of the model, also the refusal of an unknown one."""


class Translation:
    """Translates the requests of all models. `message_bytes_max`: bytes of the largest message."""

    def __init__(self, models: ServedModels, message_bytes_max: int) -> None:
        self._models = models
        self._message_bytes_max = message_bytes_max

    def of(self, data: bytes) -> Inference:
        """Return the inference in `data`. Raises nothing: what is wrong with it is its `error`."""
        asked = Asked(tokens_max=self._models.tokens_max)
        made = Inference(asked)
        try:
            message = self._parse(data)
            asked.model_name, asked.id = message.model_name[:MODEL_CHARACTERS_MAX], message.id
            if len(asked.id) > ID_CHARACTERS_MAX:
                asked.id = ""
                raise tensors.refused(
                    "id", f"{len(message.id)} characters long", f"at most {ID_CHARACTERS_MAX} characters"
                )
            model = self._models.get(message.model_name, message.model_version)
            made.contract, asked.end_token_ids = model.contract, model.end_token_ids
            asked.request.model = model.mesh_model
            _take(asked, model.contract, message)
            made.data = asked.encode()
        except MeshError as error:
            made.error = error
        return made

    def _parse(self, data: bytes) -> Any:
        if len(data) > self._message_bytes_max:
            what = Violation(wire.MESSAGE, f"{len(data)} bytes", f"at most {self._message_bytes_max} bytes")
            raise invalid("MESSAGE_TOO_LARGE", [what])
        descriptor = service_pb2.ModelInferRequest.DESCRIPTOR
        if len(data) >= wire.LOOK_BYTES_MIN:
            wire.look(data, descriptor, FIELDS_MAX, 2 * self._models.tokens_max)
        try:
            return service_pb2.ModelInferRequest.FromString(data)
        except DecodeError:
            raise wire.malformed(data, descriptor) from None


def in_terms_of(error: MeshError, contract: Contract | None) -> MeshError:
    """Return `error` with the names of inputs in place of the mesh's fields."""
    if contract is None or not error.violations:
        return error
    renamed = [each_named(each, contract) for each in error.violations]
    made = invalid(error.reason, renamed)
    made.retry_after_s, made.quota, made.trailers = error.retry_after_s, error.quota, error.trailers
    return made


def each_named(violation: Violation, contract: Contract) -> Violation:
    """Return `violation` with the name of the input for its field, if there is one."""
    if violation.field.partition("[")[0] in contract.inputs:
        return violation
    for name, each in contract.inputs.items():
        if each.field and violation.field.startswith(each.field):
            field = f"{name}{violation.field.removeprefix(each.field)}"
            return Violation(field, violation.value, violation.allowed, violation.is_clause)
    return violation


def _take(asked: Asked, contract: Contract, message: Any) -> None:
    """Put the parameters, the inputs and the requested outputs of `message` into `asked`. Raises MeshError."""
    parameters.take(asked, message.parameters)
    raws = message.raw_input_contents
    if raws and len(raws) != len(message.inputs):
        raise tensors.refused(
            "raw_input_contents", f"of {len(raws)} tensors", f"{len(message.inputs)}, one for each input,"
        )
    seen = set[str]()
    for index, tensor in enumerate(message.inputs):
        name = tensor.name
        declared = contract.inputs.get(name)
        if declared is None:
            raise _not_offered(name, contract)
        if name in seen:
            raise tensors.refused(name, "there twice", "one input of a name")
        seen.add(name)
        declared.take(asked, name, tensors.values(declared.tensor, tensor, raws[index] if raws else None))
    missing = [name for name, each in contract.inputs.items() if each.is_required and name not in seen]
    if missing:
        wanted = contract.inputs[missing[0]].tensor
        raise tensors.refused(missing[0], "missing", f"one {wanted.datatype} of shape {[1, *wanted.dims]}")
    asked.outputs = _outputs(contract, message.outputs)
    contract.finish(asked)


def _not_offered(name: str, contract: Contract) -> MeshError:
    why = contract.refuses.get(name)
    if why is not None:
        return invalid("FEATURE_UNSUPPORTED", [Violation(name[:64], "set", why, is_clause=True)])
    allowed = f"one of {', '.join(contract.inputs)}"
    return invalid(
        "FIELD_UNKNOWN", [Violation(name[:64] or "(input)", f"no input of {contract.name}", allowed)]
    )


def _outputs(contract: Contract, requested: Sequence[Any]) -> frozenset[str]:
    known = {each.name for each in contract.outputs}
    for each in requested:
        if each.name not in known:
            allowed = f"one of {', '.join(sorted(known))}"
            raise invalid("FIELD_UNKNOWN", [Violation("outputs", repr(each.name[:64]), allowed)])
        for key in each.parameters:
            raise tensors.refused(
                f"outputs[{each.name!r}]",
                f"with the parameter {key[:64]!r}",
                "no parameter, such as classification,",
            )
    names = frozenset(each.name for each in requested)
    if names and not contract.always <= names:
        lacking = ", ".join(sorted(contract.always - names))
        raise tensors.refused(
            "outputs", f"without {lacking}", f"none, or some with {', '.join(sorted(contract.always))},"
        )
    return names
