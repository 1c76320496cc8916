"""What do all execution strategies share? The clock, synchronization, messages and the fluid network."""
