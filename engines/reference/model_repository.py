"""The configuration of the reference engine's Triton model."""

from dataclasses import dataclass

from engines.contract import model_repository
from engines.contract.step_frames import VERSION
from engines.contract.tensors import GUIDE_INPUTS, INPUTS, OUTPUTS, STEP_FRAME, Output
from engines.reference.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Values of the model's configuration that are not in EngineConfig."""

    vocab_size: int
    max_sequence_tokens: int
    http_address: str  # "host:port" of the server that loads the model
    server_pid: int  # process id of that server, which starts the model's process
    digest: str = ""  # of the arithmetic: weights or salt, and vocabulary


def config_pbtxt(config: EngineConfig, facts: ModelFacts) -> str:
    """Return the model's config.pbtxt."""
    parameters: dict[str, object] = {
        "tokens_per_block": config.block_tokens,
        "kv_blocks": config.kv_blocks,
        "max_sequence_tokens": facts.max_sequence_tokens,
        "vocab_size": facts.vocab_size,
        "max_batch_tokens": config.step_tokens_max,
        "max_batch_sequences": config.running_max,
        "max_queue_size": config.queue_max,
        "kv_address": config.kv_address,
        "arithmetic": config.arithmetic,
        "model_version": config.model_version,
        "block_hash_salt": config.salt,
        "seeded_resume": "true" if config.offers_seeded_resume else "false",
        "output_start": "true",
        "release_handoff": "true",
        "disaggregated": "true",
        "end_token": "false" if config.hide_end_token else "true",
        "engine_kind": "reference",
        "http_address": facts.http_address,
        "server_pid": facts.server_pid,
        "engine_digest": facts.digest,
        "engine": config.to_json(),
    }
    inputs = (*INPUTS, *(GUIDE_INPUTS if config.has_guides else ()))
    outputs: tuple[Output, ...] = OUTPUTS
    if config.step_frames:
        parameters["step_frames"] = VERSION
    else:
        outputs = tuple(one for one in OUTPUTS if one.name != STEP_FRAME)
    return model_repository.config_pbtxt(inputs, outputs, parameters)
