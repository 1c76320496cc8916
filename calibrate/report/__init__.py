"""What does a record say of its machine, for people?"""
