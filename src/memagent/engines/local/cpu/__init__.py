"""The embedded engine on a CPU: replies through a kernel of our own, prompts through torch."""
