"""The hardware model: accelerators, links, fabrics and routes."""
