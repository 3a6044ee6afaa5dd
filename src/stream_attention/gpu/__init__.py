"""What the GPU backends share: the CUDA driver, and launching kernels whose arguments were bound before."""
