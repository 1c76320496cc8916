"""How is a periodic steady state detected and skipped?"""
