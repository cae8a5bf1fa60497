"""``titan-rl principles``: rows to train on, made by a written constitution and a judge."""
