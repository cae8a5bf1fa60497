"""Tasks on words, names and sentences, made here without end: reversing, sorting, guessing."""
