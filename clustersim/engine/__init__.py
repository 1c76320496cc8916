"""WHEN DOES IT HAPPEN? A simpy engine runs programs."""
