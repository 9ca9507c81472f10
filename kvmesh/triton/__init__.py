"""The Triton adapter: what prefill and decode services know of an engine.

Pure parts (no I/O, no clock): `port` (the interface cores see), `capabilities`, `errors`, `tensors`. Shells: `client`
(calls to one Triton server), `engine` (the port on it).
"""
