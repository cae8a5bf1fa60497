"""Preferences by people: judgements of answers, their journal, alpha, and rows to train on."""
