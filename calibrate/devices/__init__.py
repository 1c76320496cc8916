"""On what are kernels run and timed?"""
