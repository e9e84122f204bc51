"""The demonstration: a real training run loses a rank, and a separate process proves that nothing of it was lost.

`train` is the training program, `observer` the process that kills and compares; they share nothing but the log files.
"""
