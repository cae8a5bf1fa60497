"""Memory of a trainer rank: free memory, parameters and moments, and their offloading."""
