"""Recipes: published experiments as TOMLs, and a run of one held beside its published curve."""
