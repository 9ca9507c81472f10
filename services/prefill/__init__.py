"""The prefill service: its queue, context_only calls and the handoffs it holds."""
