"""Does a record predict real steps that it was not measured for?"""
