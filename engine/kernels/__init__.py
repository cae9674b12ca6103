"""Kernels for CUDA devices. They need triton, which a CPU install lacks, so they are imported where they are used."""
