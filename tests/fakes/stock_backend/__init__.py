"""NVIDIA's stock C++ backend `tensorrt_llm`, impersonated: its tensors, parameters, habits and error texts.

A Python model of Triton with the reference engine and its hashed arithmetic inside, so that each answer can be checked.
Sources: NVIDIA/TensorRT-LLM, folder triton_backend. tensorrt_llm/config.pbtxt and model_instance_state.cc at 0c8de69a,
utils.cc at 19290813, custom_metrics_reporter.cc at 0d5352f5. No TensorRT-LLM engine was run for it.

Habits:

- The output never has the end token, nor a stop word. The last delta may be empty.
- All errors are INTERNAL. A failure before the engine has the text of an exception, a later one a prefix.
- There are no KV events, load reports, releases of handoffs, and no parameters of kvmesh.
- Cancellation is polled each 100 ms.
- A `generation_only` stream begins with the first token of the prefill.
- An unknown `request_type` is taken as `context_and_generation`.
- `stop` is answered with an empty final response, also for an unknown id.
- `request_output_len` is shortened to the longest sequence. It is no error.
- A `context_only` request whose first token ends it fails, because it has no handoff.
- Triton's /metrics has `nv_trt_llm_*`. They are 0 before the first iteration, and keep their last values while idle.
"""
