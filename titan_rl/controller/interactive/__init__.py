"""A run with the loop in hand: in a notebook's cell, in IPython or in a script."""
