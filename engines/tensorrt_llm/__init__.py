"""The engine on TensorRT-LLM's LLM API, inside Triton's Python backend. See engines/tensorrt_llm/README.md."""
