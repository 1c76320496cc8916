"""Which ranks, groups and links are provably equivalent?"""
