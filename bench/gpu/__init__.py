"""The router's estimate of prefill cost, compared with a GPU: measured, or from published timings."""
