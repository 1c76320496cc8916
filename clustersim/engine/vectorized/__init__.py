"""How are all ranks that run one program advanced as arrays?"""
