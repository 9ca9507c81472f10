"""What kvmesh costs: CPU, memory and added latency of each service, measured from outside.

The process under test runs alone on one core; its neighbours are processes of this package on another core that speak
the Attach protocol (`source`, `sink`) or the mesh's own API (`client`). Nothing here is imported by a service.
"""
