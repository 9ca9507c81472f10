"""Metadata and configuration of the models, both from their contracts, so that they agree. Pure."""

from __future__ import annotations

from typing import Any, Final

from kvmesh import __version__
from services.frontend.surface.kserve.protocol import model_config_pb2, service_pb2
from services.frontend.surface.kserve.served_models import VERSION, ServedModel
from services.frontend.surface.kserve.tensors import BYTES, Declared

PLATFORM: Final = "kvmesh"
"""Platform and backend. A platform `ensemble` would have a schedule of models, which perf_analyzer reads."""

EXTENSIONS: Final = (
    "model_repository",
    "model_configuration",
    "schedule_policy",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
"""Extensions of KServe v2, of which requests may use the part that docs/triton.md names."""

BATCH_MAX: Final = 1
BATCH: Final = -1


def server() -> Any:
    """Return the ServerMetadataResponse."""
    return service_pb2.ServerMetadataResponse(name="kvmesh", version=__version__, extensions=EXTENSIONS)


def metadata(model: ServedModel) -> Any:
    """Return the ModelMetadataResponse of `model`."""
    contract = model.contract
    return service_pb2.ModelMetadataResponse(
        name=model.name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[_tensor(each.tensor) for each in contract.inputs.values()],
        outputs=[_tensor(each) for each in contract.outputs],
    )


def config(model: ServedModel) -> Any:
    """Return the ModelConfig of `model`."""
    contract = model.contract
    made = model_config_pb2.ModelConfig(
        name=model.name,
        platform=PLATFORM,
        backend=PLATFORM,
        max_batch_size=BATCH_MAX,
        model_transaction_policy=model_config_pb2.ModelTransactionPolicy(decoupled=True),
    )
    for each in contract.inputs.values():
        made.input.add(
            name=each.tensor.name,
            data_type=_data_type(each.tensor),
            dims=each.tensor.dims,
            optional=not each.is_required,
        )
    for tensor in contract.outputs:
        made.output.add(name=tensor.name, data_type=_data_type(tensor), dims=tensor.dims)
    made.parameters["exclude_input_in_output"].string_value = "true"
    return made


def _tensor(declared: Declared) -> Any:
    return service_pb2.ModelMetadataResponse.TensorMetadata(
        name=declared.name, datatype=declared.datatype, shape=[BATCH, *declared.dims]
    )


def _data_type(declared: Declared) -> int:
    name = "STRING" if declared.datatype == BYTES else declared.datatype
    return int(model_config_pb2.DataType.Value(f"TYPE_{name}"))
