"""How the weights of a version get into a vLLM model, and what is computed with them on a CPU."""
