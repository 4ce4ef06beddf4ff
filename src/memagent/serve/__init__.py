"""`memagent serve`: a local model behind an OpenAI-compatible address.

settings.py    what can be chosen
wire.py        requests, checked                errors.py     refusals in OpenAI's shape
generate.py    from a request to replies        responses.py  replies in OpenAI's shape
guard.py       key, limits, counting            metrics.py    what Prometheus reads
app.py         the addresses                    run.py        the process: start, drain, stop
"""
