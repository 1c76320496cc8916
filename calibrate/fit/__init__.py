"""Which constants of the cost models do measurements support?"""
