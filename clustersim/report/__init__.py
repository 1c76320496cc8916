"""HOW IS IT SHOWN? Pages, pictures and traces for people."""
