"""``titan-rl plan``: devices, memory and time of a run, computed before it starts."""
