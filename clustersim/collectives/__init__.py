"""HOW DOES DATA TRAVEL? A shelf of collective algorithms."""
