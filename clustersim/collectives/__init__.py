"""HOW DOES DATA TRAVEL? Algorithms as lists of flows, the libraries that offer them, and the choice among them."""
