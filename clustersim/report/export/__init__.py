"""HOW ARE TRACES EXPORTED? One table of spans, and writers for CSV, Parquet, Arrow, Perfetto and Kineto."""
