"""Which commands would a shell script run, and with which arguments?"""
