"""Check of a prediction: the scenario's model is trained on this machine and compared with its simulation."""
