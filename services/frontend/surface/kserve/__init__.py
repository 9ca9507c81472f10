"""KServe v2 over gRPC, with the models of TensorRT-LLM: a translation onto the serving path of `InferenceService`."""
