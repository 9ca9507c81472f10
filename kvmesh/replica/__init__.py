"""What prefill and decode replicas have in common beside the engine adapter.

Pure parts (no I/O, no clock): `timetable`, `heartbeat`. Shell: `process`.
"""
