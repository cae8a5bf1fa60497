"""``titan-rl collect``: a page where people judge answers, and the files that their judgements become."""
