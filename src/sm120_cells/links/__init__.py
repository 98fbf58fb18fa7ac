"""The children of ``doctor --links``: peer copies and all-reduces, each checked on the host.

``python -m sm120_cells.links REQUEST`` reads a request (JSON), starts its ranks as processes of their own, watches
them, and ends them. Its output holds messages, each one line of JSON that begins with ``{"links": 1``; every other line
is noise of a rank, with its number before it. A rank is silent for longer than the request allows: all are killed and
one message says what each was doing.
"""
