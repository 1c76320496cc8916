"""Which scenarios are inconsistent, and which deserve a warning?"""
