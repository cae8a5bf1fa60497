"""Environments and harnesses that drive the model themselves, through an OpenAI-style endpoint of their own."""
