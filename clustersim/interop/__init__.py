"""HOW DO OTHER PROGRAMS DESCRIBE A RUN? Megatron-LM and torchtitan arguments, Kineto and Chakra traces."""
