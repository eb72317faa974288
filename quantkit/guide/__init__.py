"""`quantkit go`: from a model and its target devices to a checkpoint, figures and a launch.

options    GoOptions
proposal   the schemes that an engine loads there, the proposed one, why, and its cost on this machine
record     go.json: which steps are finished
job        the steps
"""
