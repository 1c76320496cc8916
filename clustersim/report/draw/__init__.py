"""HOW IS IT DRAWN? Plotly figures: bar charts, the pipeline timeline and the all-ranks heatmap."""
