"""Conformance of an engine: what kvmesh can use of a Triton model, check by check, with the fallback of each missing part.

`judgements` and the other pure modules decide. `session` and `state_watch` call the engine. `checks` has the list.
"""
