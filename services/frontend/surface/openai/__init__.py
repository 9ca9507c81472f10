"""The OpenAI surface of a frontend: HTTP and JSON, translated onto the serving path of kvmesh.inference.v1."""
