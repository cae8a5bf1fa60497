"""The ledger of every sample, and its audit."""
