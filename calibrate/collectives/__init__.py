"""How long do collectives take between these processes?"""
