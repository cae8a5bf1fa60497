"""A model's Hugging Face directory: what it consists of, and what it can be refused for.

Nothing here needs torch. It is not in ``models/``, whose first import takes seconds: a wrong directory is told before.
"""
