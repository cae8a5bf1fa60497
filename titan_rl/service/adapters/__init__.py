"""Adapters of clients, on the trainer's ranks and on the generators."""
