"""Which tables does the offline explorer page need?"""
