"""What does a session of measuring consist of, and how long does each part of it take?"""
