"""`memagent serve`: a local model behind an OpenAI-compatible HTTP API, and in `reading` any engine behind the reader.

app.py         the routes of a local model      http.py       applications, streams, clients that leave; the process
wire.py        requests, validated; errors      chat.py       chats in OpenAI's format
responses.py   /v1/responses                    guard.py      key, body, admission; metrics, lines of requests
keys.py        API keys and their holders       listen.py     sockets, deadlines, hosts
agents.py      calls of agents in training      cluster.py    replicas on a Ray cluster
mcp.py         tools for assistants

Generation itself is in `engines/local`; settings are `ServeConfig` and `GatewayConfig` of `memagent.config`.
`memagent view` listens and checks hosts with the same code.
"""
