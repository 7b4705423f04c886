"""What to do: pure arithmetic on facts, without torch."""
