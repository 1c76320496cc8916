"""What did nccl-tests measure?"""
