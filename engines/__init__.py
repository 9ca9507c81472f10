"""Engines that speak the TensorRT-LLM tensor contract; no service imports them."""
