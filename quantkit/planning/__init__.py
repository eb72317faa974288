"""Plans before a run: sizes, memory, time and predicted decode speed, and expert placement."""
