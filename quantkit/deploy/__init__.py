"""`quantkit deploy`: launch.py fills a recipe in, memory.py says whether the model fits on every device."""
