"""How processes start, and what each of them gets."""
