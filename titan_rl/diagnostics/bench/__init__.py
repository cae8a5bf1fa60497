"""``titan-rl bench NAME``: measures the figures of the documentation again."""
