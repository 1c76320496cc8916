"""HOW ARE RESULTS PRINTED? Tables of text for the terminal."""
