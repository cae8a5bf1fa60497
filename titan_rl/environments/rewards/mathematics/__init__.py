"""Answers in mathematics: their notation, their grammar, their units, and whether two of them are equal."""
