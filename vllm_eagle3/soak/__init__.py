"""Soak: hours of mixed requests to a real server, every answer checked.

`workload` makes the requests, `client` sends them, `judge` and `law` say whether the
answers are those of the target without speculation, `meter` reads the server, `checks`
says whether anything leaked or decayed; `run` puts them together.
"""
