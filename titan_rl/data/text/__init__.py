"""The one place where text becomes tokens, for prompts, worked examples, rows of data, replies and agents alike."""
