"""PyTorch's FSDP2 as the engine of stage 3, and of stage 2 if asked for."""
