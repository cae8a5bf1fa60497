"""Models and the tokenizer that are made here, without a download."""
