"""Rows of data files: columns, shapes, splits."""
