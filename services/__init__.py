"""The processes of the mesh, one package per role. None imports another."""
