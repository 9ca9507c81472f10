"""Whether what the router takes a prefill to cost is what it costs on a GPU: measured, or from published timings."""
