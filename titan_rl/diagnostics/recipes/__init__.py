"""Recipes: published experiments as TOMLs, and reports that compare a run with published curves."""
