"""Pages for people: ``titan-rl watch`` looks inside runs, ``titan-rl collect`` asks for preferences."""
