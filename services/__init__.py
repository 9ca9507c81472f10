"""The services of the mesh; none imports another."""
