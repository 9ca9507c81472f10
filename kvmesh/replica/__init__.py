"""Code that prefill and decode replicas share, beside the engine adapter.

Pure parts (no I/O, no clock): `admission`, `calls`, `control_lane`, `engine_view`, `kv_sources`, `life`, `life_view`,
`load_heartbeat`. With I/O: `life_shell`, `process`, `shell`. `options` reads the command line.
"""
