"""Training as a service: the mesh behind the Tinker API."""
