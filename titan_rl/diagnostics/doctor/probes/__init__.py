"""Measurements on the actors of a run, on which checks are based."""
