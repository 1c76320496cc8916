"""WHAT MACHINE IS THERE? Accelerators, links, fabrics and routes."""
