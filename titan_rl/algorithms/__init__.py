"""Scored groups become advantages, advantages become a loss."""
