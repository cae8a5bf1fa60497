"""``titan-rl watch``: a page that looks inside runs, from their directories alone. NiceGUI is imported nowhere else."""
