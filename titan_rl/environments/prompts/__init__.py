"""Prompt sources: streams, files, curriculum."""
