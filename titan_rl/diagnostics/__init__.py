"""What inspects a run, measures it, or injects faults into it."""
