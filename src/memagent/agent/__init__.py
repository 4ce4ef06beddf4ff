"""The loop that reads a text section by section and rewrites its memory. Knows no tensors."""
