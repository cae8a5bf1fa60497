"""Layout of a run directory."""
