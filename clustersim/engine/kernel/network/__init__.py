"""HOW FAST DOES EACH ACTIVITY ADVANCE? Rates of activities that share resources."""
