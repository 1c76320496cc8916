"""What is written down while a program runs, and how is it read back?"""
