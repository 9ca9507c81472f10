"""The Triton model of the reference engine. Triton loads it through the generated model.py of the model repository."""

from collections.abc import Callable

from engines.contract.output_queue import OutputQueue
from engines.contract.request import RequestLimits
from engines.contract.triton_model import StartedEngine, TritonModel
from engines.reference import config
from engines.reference.engine import ReferenceEngine
from engines.reference.fault_injector import FaultInjector
from engines.reference.loading import load_arithmetic, load_guide_compiler


class TritonPythonModel(TritonModel):
    """Starts the engine described by the parameter `engine`, JSON of EngineConfig."""

    def start_engine(
        self, parameters: dict[str, str], output_queue: OutputQueue, kill_server: Callable[[], None]
    ) -> StartedEngine:
        """See TritonModel."""
        settings = config.from_json(parameters["engine"])
        arithmetic, digest = load_arithmetic(settings)
        faults = FaultInjector(settings.faults, kill_server) if settings.faults else None
        compile_guide = load_guide_compiler(settings)
        engine = ReferenceEngine(settings, arithmetic, digest, output_queue, faults, compile_guide)
        engine.start()
        limits = RequestLimits(arithmetic.vocab_size, arithmetic.max_sequence_tokens, settings.has_guides)
        return StartedEngine(engine, limits, settings.cancellation_check_s)
