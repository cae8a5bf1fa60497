"""Packed rows of token sequences."""
