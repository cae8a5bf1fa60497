"""Questions that are answered by searching a corpus of the user's own."""
