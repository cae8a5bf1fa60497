"""Preferences by people: judgements of answers, their journal, agreement, and rows to train on."""
