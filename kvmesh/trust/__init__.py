"""Mutual TLS (mTLS) between the processes of a mesh: certificates that name roles, and permissions by role."""
