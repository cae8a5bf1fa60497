"""From packed rows to a loss."""
