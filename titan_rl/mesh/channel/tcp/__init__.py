"""Blocks over TCP between hosts that have no RDMA hardware."""
