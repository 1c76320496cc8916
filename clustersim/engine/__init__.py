"""Discrete-event simulation engine: when does each task of each rank run?"""
