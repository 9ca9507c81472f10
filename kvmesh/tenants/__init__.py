"""Who may use the mesh, and how much: tenants, their organisations, classes and keys."""
