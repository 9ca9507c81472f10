"""The control plane: decisions about pools, versions and rollouts, published as snapshots.

The cores are pure. No service imports this package, and it imports neither services nor the simulator.
"""
