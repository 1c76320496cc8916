"""What is handed to other tools? One table of spans, and thin writers of it: CSV, Parquet, Arrow, Perfetto, Kineto."""
