"""A local web page that compares the greedy answers and token probabilities of one or two
models."""
