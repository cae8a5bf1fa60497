"""TorchTitan's private names. ``device`` comes before any other part of TorchTitan (models/device.py)."""
