"""Code that prefill and decode replicas share, beside the engine adapter.

Pure parts (no I/O, no clock): `admission`, `calls`, `engine_view`, `load_heartbeat`. With I/O: `process`, `shell`.
`options` reads the command line.
"""
