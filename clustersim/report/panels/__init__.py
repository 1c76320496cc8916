"""WHAT DOES A PAGE CONSIST OF? Cards, each of which asks an answer what it shows."""
