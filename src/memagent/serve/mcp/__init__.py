"""`memagent mcp`: tools for assistants that speak the Model Context Protocol.

desk.py        which documents may be asked, and their readings on disk
server.py      the tools, over standard input and output

The reader itself is in `agent`; the gateway for chat clients is in `serve/reading`.
"""
