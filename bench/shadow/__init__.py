"""Shadow traffic under load: users' latency with the target black-holed, in interleaved blocks."""
