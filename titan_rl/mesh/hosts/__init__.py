"""``titan-rl host``, and how a controller uses other hosts."""
