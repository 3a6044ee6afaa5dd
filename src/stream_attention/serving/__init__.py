"""Attention backends of engines that serve models; each file but `vllm_plugin` and `limits` needs its engine."""
