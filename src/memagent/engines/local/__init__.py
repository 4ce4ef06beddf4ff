"""The embedded engine: a language model in this process, on torch."""
