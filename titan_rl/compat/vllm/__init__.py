"""vLLM's private names; ``generator/`` alone imports these modules."""
