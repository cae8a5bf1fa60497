"""Fork servers: processes that start with their imports done."""
