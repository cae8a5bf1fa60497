"""The views of the watch page."""
