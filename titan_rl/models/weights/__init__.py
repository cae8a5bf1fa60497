"""Weights by name: Hugging Face files, LoRA adapters, shards."""
