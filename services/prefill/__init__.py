"""The prefill service: the prefill queue, context_only engine calls and held handoffs."""
