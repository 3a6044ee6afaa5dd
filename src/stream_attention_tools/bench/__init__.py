"""Measuring attention: suites (what), providers (who), accuracy (is it right), timing (how fast), results (the file).

A provider is compared with the fp64 reference on a cell before it is timed on it, and one that is wrong has no speed.
"""
