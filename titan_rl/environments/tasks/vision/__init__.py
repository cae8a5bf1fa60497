"""Tasks of pictures, made here without end."""
