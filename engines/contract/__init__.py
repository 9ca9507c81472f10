"""The contract that all engines share: the tensors of TensorRT-LLM's `tensorrt_llm` model, and what kvmesh adds to them.

An engine implements `engine.Engine` and subclasses `triton_model.TritonModel`. See docs/engines.md.
"""
