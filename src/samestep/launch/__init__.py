"""Starting ranks: what to start, where, and what to say when one of them fails."""
