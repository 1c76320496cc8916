"""HOW FAR IS IT TRUSTED? What a step is like (facts, known), and how far unseen steps like it were (band, words)."""
