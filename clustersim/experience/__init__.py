"""HOW FAR IS IT TRUSTED? Regimes of steps (facts, terms), and how far unseen steps were from predictions in them (band)."""
