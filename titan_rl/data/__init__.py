"""What flows: the vocabulary from a prompt to a packed batch. No torch here."""
