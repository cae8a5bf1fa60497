"""Tasks of public evaluation sets, each in the set's own schema."""
