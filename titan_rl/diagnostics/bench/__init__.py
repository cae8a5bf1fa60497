"""``titan-rl bench NAME``: every figure of the documentation, measured again."""
