"""HOW ARE RESULTS REPORTED? HTML pages, terminal output and trace exports."""
