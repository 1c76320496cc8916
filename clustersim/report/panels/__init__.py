"""What does a page consist of? Panels, each of which reads a simulation result."""
