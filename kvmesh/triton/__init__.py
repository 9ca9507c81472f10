"""Adapter of the prefill and decode services to an engine behind Triton.

Pure parts (no I/O, no clock): `port` (the interface of the cores), `capabilities`, `fact_sources`, `server_metrics`,
`errors`, `tensors`, `service_messages`, `liveness`, `deferred_calls`, `subscription_policy`.

With I/O: `client` (calls to one Triton server), `engine` (the port on it), `subscription` (a stream of the engine),
`metrics_poll` (Triton's /metrics).
"""
