"""What the HTTP servers of this package share: `memagent serve` and `memagent view`.

hosts.py       Host and Origin headers          deadline.py   a time limit for headers
listening.py   a socket on a host and port

Routes, keys and limits of requests are with each server.
"""
