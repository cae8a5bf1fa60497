"""torch's private names; each module imports no more of torch than its names need."""
