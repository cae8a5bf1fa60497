"""Everything that touches vLLM."""
