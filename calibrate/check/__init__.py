"""HOW TRUE IS A PREDICTION? The scenario's real model, trained on this machine, beside its simulation."""
