"""How samples are stored, and the writers of packed files."""
