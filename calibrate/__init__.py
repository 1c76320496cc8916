"""HOW FAST IS THE REAL MACHINE? Fits of published measurements and, with torch, measurements of local hardware."""
