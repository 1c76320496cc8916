"""How is a program run rank by rank? The specification that faster strategies are held against."""
