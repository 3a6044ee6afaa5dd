"""Measuring and estimating memory: the profiler, the allocators it reads, and estimates of calls and caches.

Users import them from `stream_attention.utils.memory`.
"""
