"""How long do kernels take on this machine?"""
