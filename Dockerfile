# StreamAttention on an NVIDIA GPU. CI has neither Docker nor a GPU, so it does not build this file: tests/test_examples.py
# checks only that it is well formed and that what it copies exists.
#
# The base image brings Python 3.12, torch 2.11.0, triton 3.6.0, CUDA 13.0 and cuDNN 9: the torch and triton our results
# on the H200 were measured with. It needs a driver of the 580 series or newer; for an older driver build with
# --build-arg BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime. The host needs the NVIDIA Container Toolkit.
#
#   docker build -t stream-attention .
#   docker run --rm --gpus all stream-attention                                   # stream-attention info
#   docker run --rm --gpus all stream-attention stream-attention-benchmark --seq 1024 4096
#   docker run --rm -it --gpus all --ipc=host -v "$PWD:/work" -w /work stream-attention bash
#
# Many GPUs of one machine: NCCL and data loaders pass data through /dev/shm, of which a container gets 64 MiB. Give it the
# host's with --ipc=host, or its own with --shm-size=8g; else NCCL stops with "No space left on device" or "bus error".
#
#   docker run --rm --gpus all --ipc=host stream-attention torchrun --standalone --nproc-per-node=gpu train.py
#
# Many machines: --network=host is the simplest, as NCCL opens ports of its own choice beside MASTER_PORT. With a bridge
# network publish MASTER_PORT (-p 29500:29500) and name the interface in NCCL_SOCKET_IFNAME. docs/troubleshooting.md has
# the rest.

ARG BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime
FROM ${BASE}

# Triton compiles a small C module for the driver at its first launch: it needs gcc and Python.h.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home stream
WORKDIR /home/stream/stream-attention
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY examples ./examples

# The image's Python is the system's, hence the flag; torch and triton are there already and stay as they are.
RUN python3 -m pip install --no-cache-dir --break-system-packages ".[bench]"

USER stream
# Compiled kernels: mount a volume here to keep them from one container to the next.
ENV TRITON_CACHE_DIR=/home/stream/.triton/cache
CMD ["stream-attention", "info"]
