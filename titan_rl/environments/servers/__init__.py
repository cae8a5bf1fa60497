"""External environments behind servers: OpenEnv, NeMo Gym."""
