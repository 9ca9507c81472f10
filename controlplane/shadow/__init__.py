"""Shadow traffic at the control plane: orders, counts of all frontends, the comparison. Pure."""
