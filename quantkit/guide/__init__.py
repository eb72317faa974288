"""The whole job from one command: from a model and the devices that shall serve it to a checkpoint,
figures, and a launch.

boxes.py      what the devices are
proposal.py   the schemes that an engine loads there, which one is proposed and why, what it will cost
pace.py       how fast this machine works, by a short probe
record.py     which steps are done: the file that a later run goes on from
job.py        the steps
"""
