"""What is true of this process and its machine: frozen dataclasses, without torch."""
