"""Agents that come with memagent. Each is a file to start your own from."""
