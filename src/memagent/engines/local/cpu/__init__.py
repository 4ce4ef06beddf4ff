"""The embedded engine on a CPU: replies through a C kernel, prompts through torch."""
