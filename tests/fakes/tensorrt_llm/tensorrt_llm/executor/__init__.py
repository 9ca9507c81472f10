"""tensorrt_llm.executor: what the engine imports of it."""
