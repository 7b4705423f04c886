"""The ranks of a run acting together: the link between them, and what crosses it."""
