"""Kubernetes manifests: checked against the roles of a mesh, and rendered by kubectl. `make manifests`."""
