"""Import of nccl-tests output."""
