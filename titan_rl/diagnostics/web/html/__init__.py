"""HTML fragments of the watch page."""
