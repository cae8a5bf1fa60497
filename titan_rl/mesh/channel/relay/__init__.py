"""Generator hosts hand a version on to each other."""
