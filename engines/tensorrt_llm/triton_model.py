"""The Triton model on TensorRT-LLM. Triton loads it through the generated model.py of the model repository."""

import importlib
import logging
from collections.abc import Callable

from engines.contract.output_queue import OutputQueue
from engines.contract.request import RequestLimits
from engines.contract.triton_model import StartedEngine, TritonModel
from engines.tensorrt_llm import llm_file, settings, versions
from engines.tensorrt_llm.engine import TensorRtLlmEngine

_log = logging.getLogger(__name__)


class TritonPythonModel(TritonModel):
    """Starts the LLM described by llm.yaml in the folder of the version."""

    def start_engine(
        self, parameters: dict[str, str], output_queue: OutputQueue, kill_server: Callable[[], None]
    ) -> StartedEngine:
        """See TritonModel."""
        written = settings.from_file(llm_file.read(self.version_folder / llm_file.NAME))
        # Not at the top: the launcher's process must not import TensorRT-LLM.
        api = importlib.import_module("engines.tensorrt_llm.api")
        warning = versions.check(api.version())
        if warning is not None:
            _log.warning("%s", warning)
        engine = TensorRtLlmEngine(written, api, output_queue, kill_server)
        engine.start()
        limits = RequestLimits(
            written.vocab_size, written.max_sequence_tokens, written.has_guides, frozenset(written.loras)
        )
        return StartedEngine(engine, limits)
