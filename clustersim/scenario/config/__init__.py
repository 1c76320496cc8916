"""Config models: one pydantic model per section of the scenario file."""
