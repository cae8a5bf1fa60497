"""Shared and pinned memory of the channels, with checksums."""
