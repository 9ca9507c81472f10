"""A recorded surface of TensorRT-LLM: the names, fields and errors that engines/tensorrt_llm may touch, and nothing else.

Put the parent of this package on PYTHONPATH, then `import tensorrt_llm` finds it. It runs the reference engine with hashed
arithmetic behind the LLM API. Each name says where it was recorded: a file of NVIDIA/TensorRT-LLM @ commit. A name that was
not recorded raises AssertionError, and is written to `violations` in the model folder (see surface.py).
"""

from .llmapi.llm import LLM
from .sampling_params import SamplingParams

__version__ = "1.2.1"  # tensorrt_llm/version.py; the newest release on PyPI

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    from .surface import refuse

    refuse("tensorrt_llm", name)
    raise AssertionError
