"""How long does this machine's host need for what a step launches?"""
