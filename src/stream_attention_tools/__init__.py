"""Instruments for StreamAttention: measuring, reports, the cluster planner, tuning, test inputs and the commands.

They import `stream_attention`. It imports none of them: `stream_attention/moved.py` alone names this package, for who
uses a module under the name that it had before.
"""
