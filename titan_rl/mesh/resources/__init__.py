"""Cores, devices, memory, ports and folders of a host."""
