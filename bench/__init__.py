"""The cost of kvmesh: CPU, memory and added latency of each service, measured from outside.

A service under test runs alone on one core. Load generators and stubs run on another core. They are processes of this
package that speak the Attach protocol (`source`, `sink`) or the client API (`client`). The processes of a whole mesh
(`mesh`) are not pinned. No service imports this package.
"""
